"""The disk that Ray and Serve write their logs to is full."""

import errno
import shutil
from collections.abc import Sequence

from dspark_ray.bench.drills.deployment import Deployment
from dspark_ray.bench.drills.drill import Drill, Fault
from dspark_ray.bench.drills.traffic import Case, Traffic

FULL_S = 15.0
CHUNK = bytes(1 << 16)


def fill(deployment: Deployment, _traffic: Traffic, _known: Sequence[Case]) -> Fault:
    """Write until nothing fits any more; whoever clears the disk comes a while later."""
    ballast = deployment.folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(CHUNK):
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    free = shutil.disk_usage(deployment.folder).free
    problems = [] if free < len(CHUNK) else [f"{free} bytes were still free"]
    return Fault(deployment.all_running, ballast.unlink, FULL_S, problems=problems)


DISK_DRILLS = (Drill("disk full for logs", fill, needs_own_disk=True),)
