# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who is who in a run: environment, roles, rendezvous, servers up, client connected.

``run`` is that, and ``context`` its life. ``comeback`` has a trainer wait for servers
in the place of lost ones, or join those that had lost it; ``roll_call`` says who has
ended while ``init()`` waits, ``other_launchers`` what srun and mpirun say, in
torchrun's words. ``rooms`` and ``loads`` are what dedicated servers tell of their
memory and their threads, ``moment`` and ``baseline`` what was counted when a warm-up
had ended.
"""
