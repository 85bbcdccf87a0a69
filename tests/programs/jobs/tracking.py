"""MLflow's file store: runs with parameters, metrics and artifacts, in many small files."""

import os
import pathlib

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from common import digest, main
from mlflow.tracking import MlflowClient

METRICS = ("loss", "accuracy")


def client():
    return MlflowClient(tracking_uri=pathlib.Path("mlruns").absolute().as_uri())


def run(steps):
    store = client()
    experiment = store.create_experiment("experiment")
    for number in steps:
        if number % 20 == 0:
            name = f"run{number}"
            current = store.create_run(experiment, start_time=number, run_name=name).info.run_id
            store.log_param(current, "number", number)
        for metric in METRICS:
            store.log_metric(current, metric, steps.random.random(), timestamp=number, step=number)
            steps.rest()
        store.set_tag(current, "last", str(number))
        if number % 20 == 15:
            pathlib.Path("note").write_text(f"{number}\n" * 1000, encoding="ascii")
            store.log_artifact(current, "note")
        if number % 20 == 19:
            store.set_terminated(current, end_time=number)
        found = store.get_run(current)
        steps.tell(number, sorted(found.data.metrics.items()), found.info.status)


def check():
    store = client()
    experiment = store.get_experiment_by_name("experiment")
    runs = store.search_runs([experiment.experiment_id])
    for found in sorted(runs, key=lambda one: one.info.start_time):
        about = (found.info.run_name, found.info.status, found.info.end_time)
        yield f"{about} {found.data.params} {found.data.tags.get('last')}"
        for metric in METRICS:
            history = store.get_metric_history(found.info.run_id, metric)
            points = [(point.step, point.value) for point in history]
            if len(points) != len(set(points)):
                yield f"BAD {metric}: a step is there twice"
            yield f"{metric} {len(points)} {digest(points)}"
        yield str([(one.path, one.file_size) for one in store.list_artifacts(found.info.run_id)])


main(run, check, 160, rests=3)
