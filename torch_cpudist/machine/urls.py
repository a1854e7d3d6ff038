# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""File systems of URLs (hdfs, object stores), by fsspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch_cpudist.errors import ConfigurationError, Error

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def is_url(path: str) -> bool:
    """Whether a name is a URL (``hdfs://…``, ``s3://…``) and no path of this system."""
    return _URL.match(path) is not None


def system_of(
    url: str, options: Mapping[str, Any], failure: type[Error]
) -> tuple[Any, str]:
    """The file system of a URL, and what it calls the file.

    Args:
        url: of a file or folder.
        options: of the file system.
        failure: what is raised where it cannot be reached.

    Raises:
        ConfigurationError: fsspec or its driver of the scheme is not installed, or the
            scheme is unknown.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ConfigurationError(
            f"{url}: files of other systems need the package fsspec: pip install "
            "fsspec. Or mount the system, and pass paths"
        ) from error
    try:
        system, name = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise ConfigurationError(
            f"{url}: fsspec has no driver for {scheme}://: {error}. Install what it "
            "names, or check the scheme"
        ) from error
    except Exception as error:
        raise failure(f"{url}: {error or type(error).__name__}") from error
    return system, str(name)
