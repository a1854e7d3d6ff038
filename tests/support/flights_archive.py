# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small archives of the form of the flights data."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import flights_data

HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,"
    "carrier,flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)
ROW = (
    "2013,{month},{day},{dep_time},515,{dep_delay},{arr_time},819,{arr_delay},"
    "{carrier},1545,{tailnum},EWR,IAH,{air_time},{distance},5,15,{time_hour}"
)
KNOWN = {
    **{"month": 1, "day": 1, "carrier": "UA", "tailnum": "N1", "distance": 1400},
    **{"dep_time": 517, "dep_delay": 2, "arr_time": 830, "air_time": 227},
    **{"arr_delay": 11, "time_hour": "T10"},
}
PLANES = (
    "tailnum,year,type,manufacturer,model\nN2,NA,x,AIRBUS,A320\nN1,2004,x,BOEING,737\n"
)
WEATHER = (
    "origin,time_hour,visib,wind_speed,precip,temp\n"
    "EWR,T10,10,10.35,NA,39.02\nEWR,T11,2,3,0.1,-4\nJFK,T10,1,1,1,1\n"
)


def make_archive(path: Path, rows: list[dict[str, object]]) -> Path:
    lines = [HEADER, *(ROW.format(**(KNOWN | row)) for row in rows)]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    members = {
        "flights.csv.zip": zipped.getvalue(),
        "planes.csv": PLANES.encode(),
        "weather.csv": WEATHER.encode(),
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(flights_data.ARCHIVE_FOLDER + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path
