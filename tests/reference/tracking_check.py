"""Checks a run's trackers with the real packages: tensorboard reads its event files, `wandb sync` uploads its folder, and an
MLflow server receives its metrics. Each must have the values of metrics.jsonl, also after a run that was killed and resumed.

    tracking_check.py TRAINER

TRAINER is a debug build, because only those can be killed at a step. Run it in the workspace's root. Needs no network.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECIPE = "recipes/quickstart.yaml"
STEPS = 8
KILLED_AFTER = 5
SETTINGS = [
    f"train_iters={STEPS}",
    "checkpoint=[{output_dir: OUT/checkpoints, auto_resume: true, save_every_n_steps: 3}]",
    "output_dir=OUT",
    "data.cache_dir=OUT/cache",
    "eval_interval=4",
    "eval_on_start=false",
    "train_log_iter_interval=1",
    "generate=null",
    "run_name=check",
]


class WandbServer:
    """The part of a W&B server that clients of a run use. Keeps the state that they leave."""

    def __init__(self):
        self.operations, self.history, self.summary = [], [], {}
        self.upsert, self.exits, self.stream_keys = {}, [], set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                # A client also posts telemetry, which is not JSON.
                is_json = self.headers.get("content-type", "").startswith("application/json")
                self.reply(server.respond(self.path, json.loads(body)) if is_json else {})

            def do_PUT(self):
                """Accepts the upload of a file."""
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.reply({})

            def reply(self, response):
                text = json.dumps(response).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def respond(self, path, body):
        if path.endswith("/file_stream"):
            self.file_stream(body)
            return {}
        return {"data": self.graphql(body)}

    def graphql(self, body):
        query, variables = body.get("query", ""), body.get("variables") or {}
        name = body.get("operationName") or query.split("(")[0].split("{")[0].split()[-1]
        self.operations.append(name)
        bucket = {
            "id": "run-storage-id",
            "name": variables.get("name"),
            "displayName": variables.get("displayName"),
            "description": None,
            "config": variables.get("config"),
            "sweepName": None,
            "historyLineCount": len(self.history),
            "project": {"id": "project-id", "name": variables.get("project"), "entity": {"id": "e", "name": "team"}},
        }
        match name:
            case "UpsertBucket":
                self.upsert = {**self.upsert, **{key: value for key, value in variables.items() if value is not None}}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "RunResumeStatus":
                if not self.upsert:
                    return {"model": {"bucket": None}}
                tail = json.dumps([json.dumps(line) for line in self.history[-1:]])
                lines = {"historyLineCount": len(self.history), "historyTail": tail}
                return {"model": {"bucket": {**lines, "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "run-storage-id", "uploadHeaders": [], "files": files}}
            case "Viewer":
                return {"viewer": {"id": "v", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}
            case "RunStoppedStatus":
                return {"project": {"run": {"stopped": False}}}
            case _:
                return {}

    def file_stream(self, body):
        self.stream_keys |= set(body)
        history = body.get("files", {}).get("wandb-history.jsonl", {})
        for idx, line in enumerate(history.get("content", [])):
            at = history["offset"] + idx
            assert at <= len(self.history), f"the history has a gap before line {at}"
            self.history[at:] = [json.loads(line)]
        for line in body.get("files", {}).get("wandb-summary.json", {}).get("content", []):
            self.summary = json.loads(line)
        if body.get("complete"):
            self.exits.append(body["exitcode"])


def train(trainer, out, report_to, env, kill_at=None):
    settings = [setting.replace("OUT", str(out)) for setting in SETTINGS]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", **env}
    if kill_at:
        environ["CANDLEWICK_TEST_KILL_AT"] = f"step_computed:{kill_at}"
    command = [trainer, "train", RECIPE, *settings, f"report_to={report_to}"]
    done = subprocess.run(command, env=environ, text=True, stderr=subprocess.PIPE)
    expected = -signal.SIGKILL if kill_at else 0
    assert done.returncode == expected, f"exit code {done.returncode}:\n{done.stderr}"
    return done.stderr


def written(out, name):
    """Returns the values of a field of metrics.jsonl by step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["iter"], record[name]) for record in records if name in record]


NAMES = ["loss", "lr", "grad_norm", "loss/eval", "tokens_per_second"]


def check_tensorboard(trainer, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = folder / "tensorboard"
    train(trainer, out, "tensorboard", {}, kill_at=KILLED_AFTER)
    train(trainer, out, "tensorboard", {})
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    for name in NAMES:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        want = written(out, name)
        assert [step for step, _ in found] == [step for step, _ in want], f"{name}: {found} instead of {want}"
        assert all(abs(a - b) <= 1e-6 * abs(b) for (_, a), (_, b) in zip(found, want)), f"{name}: {found}"
    text = events.Tensors("run")[-1].tensor_proto.string_val[0].decode()
    assert "| parameters |" in text and "| mesh/world_size | 1 |" in text, text
    print(f"tensorboard: {len(events.Tags()['scalars'])} tags, {STEPS} steps after a kill and a resume")


def check_history(server, out):
    for name in NAMES:
        found = [(line["_step"], line[name]) for line in server.history if name in line]
        assert found == written(out, name), f"{name}: {found} instead of {written(out, name)}"
    assert [line["_step"] for line in server.history] == list(range(1, STEPS + 1))
    assert server.summary["_step"] == STEPS and server.summary["loss"] == written(out, "loss")[-1][1]
    config = json.loads(server.upsert["config"])
    run = json.loads((out / "run.json").read_text())["run"]
    assert config["parameters"]["value"] == run["parameters"]
    assert config["mesh/world_size"]["value"] == 1 and config["global_batch_size"]["value"] > 0
    assert config["optimizer.learning_rate"]["value"] > 0 and config["versions/candlewick"]["value"]
    assert server.upsert["displayName"] == "check" and server.upsert["project"] == "candlewick"


def check_wandb_offline(trainer, folder):
    out = folder / "wandb-offline"
    train(trainer, out, "wandb", {"WANDB_MODE": "offline"}, kill_at=KILLED_AFTER)
    unreachable = {"WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}", "WANDB_API_KEY": "k" * 40}
    log = train(trainer, out, "wandb", unreachable)
    assert "upload the run with `wandb sync" in log, log
    (run,) = (out / "wandb").iterdir()
    server = WandbServer()
    key = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40, "WANDB_DIR": str(folder)}
    sync = [str(Path(sys.executable).parent / "wandb"), "sync", str(run)]
    for attempt in ["first", "second"]:
        done = subprocess.run(sync, env={**os.environ, **key}, text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, f"{attempt} wandb sync:\n{done.stdout}{done.stderr}"
        check_history(server, out)
    assert server.exits[-1] == 0, server.exits
    assert list(run.glob("*.wandb.synced")), "wandb sync has left no marker"
    print(f"wandb sync: {len(server.history)} steps of {run.name}, synced twice")
    return server


def check_wandb_online(trainer, folder, synced):
    out = folder / "wandb-online"
    server = WandbServer()
    env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
    train(trainer, out, "wandb", env, kill_at=KILLED_AFTER)
    train(trainer, out, "wandb", env)
    check_history(server, out)
    assert server.exits[-1] == 0, server.exits
    # W&B's client sends these operations and keys, too.
    assert set(server.operations) - {"RunResumeStatus"} <= set(synced.operations), server.operations
    assert server.stream_keys <= synced.stream_keys, server.stream_keys
    unknown = set(server.upsert) - set(synced.upsert) - {"notes", "tags", "groupName", "jobType"}
    assert not unknown, f"wandb's upsertBucket has no {unknown}"
    print(f"wandb online: {len(server.history)} steps, operations {sorted(set(server.operations))}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def check_mlflow(trainer, folder):
    from mlflow import MlflowClient

    out, port = folder / "mlflow", free_port()
    url = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "artifacts")]
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    log = open(folder / "mlflow.log", "w")
    process = subprocess.Popen([*server, *store], stdout=log, stderr=log)
    try:
        client = MlflowClient(url)
        for _ in range(120):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(1)
        env = {"MLFLOW_TRACKING_URI": url, "MLFLOW_EXPERIMENT_NAME": "candlewick-check"}
        train(trainer, out, "mlflow", env, kill_at=KILLED_AFTER)
        train(trainer, out, "mlflow", env)
        experiment = client.get_experiment_by_name("candlewick-check")
        (run,) = client.search_runs([experiment.experiment_id])
        assert (run.info.status, run.info.run_name) == ("FINISHED", "check"), run.info
        for name in NAMES:
            found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
            assert sorted(found) == written(out, name), f"{name}: {found} instead of {written(out, name)}"
        params = run.data.params
        assert int(params["parameters"]) > 0 and params["mesh/world_size"] == "1", params
        assert "optimizer.learning_rate" in params and "versions/candlewick" in params, params
        print(f"mlflow: {len(run.data.metrics)} metrics, {len(params)} parameters, {STEPS} steps after a kill and a resume")
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer")
    args = parser.parse_args()
    trainer = str(Path(args.trainer).resolve())
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        check_tensorboard(trainer, folder)
        check_wandb_online(trainer, folder, check_wandb_offline(trainer, folder))
        check_mlflow(trainer, folder)


if __name__ == "__main__":
    main()
