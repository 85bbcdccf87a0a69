"""TensorBoard: writers of events, opened anew at times, as trainings do it. No step may be missing or there twice."""

import collections
import pathlib

from common import main
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def run(steps):
    writer = EventFileWriter("logs", flush_secs=1)
    for number in steps:
        loss = steps.random.random()
        value = Summary.Value(tag="loss", simple_value=loss)
        writer.add_event(Event(wall_time=number, step=number, summary=Summary(value=[value])))
        steps.rest()
        if number % 10 == 0:
            writer.flush()
        if number % 100 == 99:
            writer.close()
            steps.rest()
            writer = EventFileWriter("logs", flush_secs=1, filename_suffix=f".{number}")
        steps.tell(number, loss)
    writer.close()


def check():
    steps, last = collections.Counter(), []
    for path in sorted(pathlib.Path("logs").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = (
                    value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                )
                steps[event.step] += 1
                last.append((event.step, f"{number:.6f}"))
    if twice := [step for step, count in steps.items() if count > 1]:
        yield f"BAD steps there twice: {twice[:5]}"
    yield from (str(one) for one in sorted(last))


main(run, check, 400, rests=1)
