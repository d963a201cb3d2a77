"""Runs one application on a Ray cluster of its own: the process behind `serving_harness.RunningApp`.

    python serving_driver.py ARGS.json HTTP_PORT TEMP_DIR [--declarative]

With --declarative the application is deployed as ``serve deploy`` does it, and can be again.
Takes one JSON command a line on stdin and answers with one JSON line on the descriptor that stdout was at the
start. Everything that Ray prints goes to stderr. Ends, with its cluster, when stdin closes.
"""

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

APP_NAME = "dspark"
RESULT_TIMEOUT_S = 30.0


def main(
    args_file: str, port: int, temp_dir: str, reply: Callable[[Any], None], *, declarative: bool = False
) -> None:
    import ray
    from ray import serve

    from dspark_ray.serving.app import build_app

    args = json.loads(Path(args_file).read_text())
    ray.init(
        num_cpus=32,  # logical: more than the machine has, or not all replicas fit
        include_dashboard=False,
        _temp_dir=temp_dir,
        object_store_memory=200 * 2**20,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        if declarative:
            deploy(args, [])
        else:
            serve.run(build_app(args), name=APP_NAME, route_prefix="/")
        reply("ready")
        for line in sys.stdin:
            try:
                reply({"result": run(serve, json.loads(line))})
            except Exception as error:  # a failed command is the test's to judge
                reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(args: dict[str, Any], deployments: list[dict[str, Any]]) -> None:
    """What ``serve deploy`` does with a file of these args and deployments, until the application runs."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    app = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": "dspark_ray.serving.app:build_app",
        "args": args,
        "deployments": deployments,
    }
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema(applications=[app]))
    client._wait_for_application_running(APP_NAME)


def run(serve: Any, command: dict[str, Any]) -> Any:
    """Carry out a command: ``call`` one replica or ``call_all``, tell ``states``, run a ``drill`` in this process."""
    args = command.get("args", ())
    match command["do"]:
        case "call":
            handle = serve.get_deployment_handle(command["deployment"], APP_NAME)
            return getattr(handle, command["method"]).remote(*args).result(timeout_s=RESULT_TIMEOUT_S)
        case "call_all":
            answers = _broadcaster(serve, command["deployment"]).broadcast(command["method"], *args)
            return answers.results(timeout_s=RESULT_TIMEOUT_S)
        case "states":
            deployments = serve.status().applications[APP_NAME].deployments
            return {name: dict(deployment.replica_states) for name, deployment in deployments.items()}
        case "deploy":
            deploy(*args)
            return None
        case "drill":
            spec = importlib.util.spec_from_file_location("drills", command["file"])
            drills = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(drills)
            return getattr(drills, command["function"])(APP_NAME, *args)
    raise ValueError(command)


@functools.cache
def _broadcaster(serve: Any, deployment: str) -> Any:
    """A handle that is kept: a new one first has to learn which replicas there are."""
    return serve.get_deployment_handle(deployment, APP_NAME)


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    main(
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3],
        lambda answer: print(json.dumps(answer), file=replies),
        declarative="--declarative" in sys.argv,
    )
