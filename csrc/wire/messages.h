// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the payloads of all kinds of frames mean; say which where you need only some.
#pragma once

#include "wire/control.h"
#include "wire/cut.h"
#include "wire/frame.h"
#include "wire/layout.h"
#include "wire/push.h"
#include "wire/rows.h"
#include "wire/runs.h"
