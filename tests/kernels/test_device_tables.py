"""Tables kept on the device, and queues, as streams and CUDA graphs want them; the streams are played."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace

import page_cases
import pytest
import torch
from prefill_kernels import device_tables, prepare_unions, regroup_queries, union_attention, unions
from prefill_kernels.device_tables import device_table, stream_of
from prefill_kernels.unions import BINS, GroupQueue

CPU = torch.device("cpu")


class Streams:
    """What :func:`stream_of` says."""

    now = (7, False)

    def __call__(self, device):
        return self.now


@pytest.fixture
def streams(monkeypatch):
    played = Streams()
    monkeypatch.setattr(device_tables, "stream_of", played)
    monkeypatch.setattr(unions, "stream_of", played)
    monkeypatch.setattr(unions, "_CLEARED", {})
    monkeypatch.setattr(device_tables, "_IN_GRAPHS", {})
    return played


def test_the_stream_is_that_of_the_device_also_where_another_is_current(monkeypatch):
    now = [0]

    @contextlib.contextmanager
    def on(device):
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    assert stream_of(torch.device("cuda", 0)) == stream_of(torch.device("cuda")) == (100, False)
    assert stream_of(torch.device("cuda", 1)) == (101, True) and now == [0]
    assert stream_of(CPU) is None


def counting(kept=4):
    made = []

    @device_table(kept=kept)
    def numbers(n: int):
        made.append(n)
        return torch.arange(n).expand(2, n)

    return numbers, made


def test_a_table_is_made_once_and_contiguous():
    numbers, made = counting()
    first = numbers(CPU, 5)
    assert first.is_contiguous() and first.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert numbers(CPU, 5) is first and numbers(CPU, 3) is not first and made == [5, 3]


def test_only_the_last_tables_are_kept_but_for_those_that_a_graph_reads(streams):
    numbers, _ = counting(kept=4)
    dropped, captured = numbers(CPU, 100), numbers(CPU, 101)
    streams.now = (7, True)
    assert numbers(CPU, 101) is captured
    dropped, captured = weakref.ref(dropped), weakref.ref(captured)
    streams.now = (7, False)
    for n in range(4):
        numbers(CPU, n)
    gc.collect()
    assert dropped() is None and captured() is not None


def test_a_table_that_only_a_graph_would_make_is_refused_and_then_made(streams):
    numbers, made = counting()
    streams.now = (7, True)
    with pytest.raises(RuntimeError, match=r"numbers\(5,\).*must run once before it is captured"):
        numbers(CPU, 5)
    streams.now = (7, False)
    assert numbers(CPU, 5).shape == (2, 5) and made == [5]


def test_other_streams_are_told_to_the_allocator(streams, monkeypatch):
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.now[0])
    numbers, _ = counting()
    for handle in (7, 7, 8):
        streams.now = (handle, False)
        numbers(CPU, 5)
    assert told == [8]


def test_a_queue_is_its_own_streams_alone(streams):
    queue = GroupQueue.in_turn(6, CPU)
    assert queue.sizes.tolist() == [6] + [0] * BINS and queue.lines.tolist() == [[5, 4, 3, 2, 1, 0]]
    assert queue.open() is queue.sizes
    queue.sizes[BINS] = 3  # a call is under way
    for other in ((8, False), (7, True)):
        streams.now = other
        copy = queue.open()
        assert copy is not queue.sizes and copy.tolist() == [6] + [0] * BINS
    assert queue.sizes[BINS] == 3


def test_a_queue_of_a_graph_is_that_graphs(streams):
    GroupQueue.in_turn(6, CPU)
    streams.now = (7, True)
    queue = GroupQueue.in_turn(6, CPU)
    assert queue.open() is queue.sizes
    streams.now = (7, False)
    assert queue.open() is not queue.sizes


def test_cleared_counts_are_handed_out_once_and_by_stream(streams):
    found = {}
    for turn in range(3 * unions._AT_ONCE):
        streams.now = (7 + turn % 2, False)
        sizes = GroupQueue.empty(4, CPU).sizes
        assert sizes.tolist() == [0] * (BINS + 1) and sizes.data_ptr() % 16 == 0
        sizes += 1
        found[sizes.data_ptr()] = (sizes, turn % 2)
    assert len(found) == 3 * unions._AT_ONCE
    of_storage = {}
    for sizes, stream in found.values():
        of_storage.setdefault(sizes.untyped_storage().data_ptr(), set()).add(stream)
    assert len(of_storage) == 4 and all(len(both) == 1 for both in of_storage.values())


def test_what_is_kept_is_of_no_inference_mode(streams):
    numbers, _ = counting()
    with torch.inference_mode():
        assert not numbers(CPU, 5).is_inference()
        GroupQueue.in_turn(6, CPU)
    queue = GroupQueue.in_turn(6, CPU)
    assert not queue.sizes.is_inference() and not queue.lines.is_inference()


def test_a_graph_clears_its_own_counts(streams):
    GroupQueue.empty(4, CPU)
    kept = len(unions._CLEARED[CPU, 7])
    streams.now = (7, True)
    sizes = GroupQueue.empty(4, CPU).sizes
    assert sizes.tolist() == [0] * (BINS + 1) and len(unions._CLEARED[CPU, 7]) == kept
    assert sizes.untyped_storage().nbytes() == 4 * (BINS + 1)


@pytest.mark.parametrize("width,shift", [(1, 0), (8, 0), (63, 0), (64, 0), (65, 1), (128, 1), (129, 2), (512, 3)])
def test_as_many_bins_are_in_use_as_tell_counts_apart(width, shift):
    assert GroupQueue.bin_shift(width) == shift


def test_unions_taken_in_turn_and_broken_queues():
    case = page_cases.make([(19, 150), (3, 90)], heads=(2, 1))
    made = prepare_unions(case.plan, regroup_queries(case.plan, backend="torch"), backend="torch")
    want = union_attention(case.q, case.kv, case.plan, made, scale=case.scale)
    queue = GroupQueue.in_turn(case.plan.groups, CPU)
    got = union_attention(case.q, case.kv, case.plan, replace(made, queue=queue), scale=case.scale)
    assert torch.equal(got, want)
    for lines in (queue.lines.expand(2, -1).contiguous(), queue.lines[:, 1:].contiguous(), queue.lines[0]):
        with pytest.raises(ValueError, match="lines of the unions' queue"):
            union_attention(
                case.q, case.kv, case.plan, replace(made, queue=replace(queue, lines=lines)), scale=case.scale
            )
