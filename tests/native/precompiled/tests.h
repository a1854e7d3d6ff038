// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// For the native tests, like precompiled/standard.h.

#include "precompiled/standard.h"
#include "support/check.h"
