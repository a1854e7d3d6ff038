# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.advise(opt)``: which knob would make a run faster, in words.

``reading`` turns counters of a trainer and its process into ``Figures``, ``judging``
says what they mean and knows figures alone, ``advising`` is what users call. Nothing
here counts. docs/tuning.md.
"""
