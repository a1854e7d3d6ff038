// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What objects that are compiled for the fuzzers call for every piece of code they reach, for
// programs that do not ask for it.

extern "C" void __sanitizer_cov_trace_pc() {}
