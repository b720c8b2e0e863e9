"""RULER: thirteen long-context tasks, generated for a tokenizer and a length, faithful to NVIDIA/RULER.

Differences to the official generator, none of which changes what a task asks: samples draw from private streams;
every sample is fitted by itself, to the last unit; the chat template and the answer prefix count as part of the
length; see the modules for the rest.
"""

from .samples import GENERATOR_VERSION, TASKS, Builder, Sample, SampleSet, TaskSpec, build, load, task_spec
from .score import score

__all__ = [
    "GENERATOR_VERSION",
    "TASKS",
    "Builder",
    "Sample",
    "SampleSet",
    "TaskSpec",
    "build",
    "load",
    "score",
    "task_spec",
]
