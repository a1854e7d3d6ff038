# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of a run: resuming from the newest, marking cuts, what a trainer adds.

``snapshots`` resumes, and saves when a script asks; ``marking`` says when else, and
marks. ``loader`` brings values of a snapshot to servers, ``own_state`` is a trainer's
part, ``trainer_tree`` the versions of what its file has, ``captured`` what is marked
and not handed on yet, which the thread that steps and the one that writes share,
``saves`` the thread that writes and commits, ``copies`` the one that copies to a store,
``paces`` when. ``meeting`` and, where trainers come and go, ``under_way`` are how
trainers agree on what was loaded; ``recovered`` counts what was lost.
"""
