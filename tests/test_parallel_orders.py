"""What the engine's process tells its workers, without any: orders are kept in a list."""

import pickle
import threading
import time

import pytest
import torch

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Host
from lessons.l20_parallelism.processes.launch import RankError
from reference.engine.request import EngineSequence
from reference.parallel.runner import DistributedRunner, RemoteHidden, RemotePool
from reference.parallel.talk import Talk
from tests.engine_cases import CONFIG


class Obedient:
    """Workers that write down what they are told, once they may. fails: the order that does not."""

    def __init__(self, fails: str | None = None):
        self.may, self.heard, self.fails, self.has_ended = threading.Event(), [], fails, False

    def tell(self, order: bytes):
        self.may.wait(10)
        self.heard.append(pickle.loads(order))
        if self.heard[-1][0] == self.fails:
            raise RankError(1, "died (signal 9)")

    def ask(self, order: bytes):
        self.tell(order)

    def collect(self):
        return [None, torch.zeros(1, 5).numpy()]

    def close(self):
        self.has_ended = True


def new_runner(workers: Obedient) -> DistributedRunner:
    return DistributedRunner(Talk(workers), CONFIG, RemotePool(6, 4, 64), 64, [])


def test_an_order_is_what_it_was_when_it_was_given():
    workers = Obedient()
    runner, table = new_runner(workers), [0, 1]
    runner.copy([(2, 3)])
    hidden = runner.run([([7, 8], 3)], [table])
    table.append(5)  # as a scheduler does, while the workers are busy
    workers.may.set()
    assert runner.logits(hidden, [1]).shape == (1, 5)
    assert workers.heard == [
        ("copy", ([(2, 3)],)),
        ("run", ([([7, 8], 3)], [[0, 1]])),
        ("logits", ([1],)),
    ]
    with pytest.raises(RuntimeError, match="hidden states of step 0 are gone, 1 ran"):
        runner.logits(RemoteHidden(0), [0])
    runner.close()
    assert workers.has_ended


class Slow(Obedient):
    """Replies wait until they may be given."""

    def __init__(self):
        super().__init__()
        self.may.set()
        self.may_reply = threading.Event()

    def collect(self):
        assert self.may_reply.wait(10)
        return super().collect()


def test_a_step_is_told_while_the_reply_to_an_earlier_one_is_on_its_way():
    workers = Slow()
    runner = new_runner(workers)
    replies = []
    for token in (7, 8):
        hidden = runner.run([([token], 3)], [[0]])
        replies.append(runner.ask_of(hidden, "logits", [0]))
    for _ in range(1000):
        if len(workers.heard) == 4:
            break
        time.sleep(0.01)
    assert [method for method, _ in workers.heard] == ["run", "logits"] * 2
    assert not any(reply.done() for reply in replies)
    workers.may_reply.set()
    assert [reply.result()[1].shape for reply in replies] == [(1, 5)] * 2
    runner.close()


def test_after_a_failure_nothing_is_told_any_more():
    workers = Obedient(fails="run")
    workers.may.set()
    runner = new_runner(workers)
    hidden = runner.run([([7], 0)], [[0]])
    for _ in range(2):
        with pytest.raises(RankError, match=r"^rank 1 died \(signal 9\)$"):
            runner.logits(hidden, [0])
    with pytest.raises(RankError):
        runner.run([([7], 0)], [[0]])
    assert [method for method, _ in workers.heard] == ["run"] and workers.has_ended


@pytest.mark.parametrize("leaves_early", [False, True])
def test_blocks_that_wait_on_the_host_come_back_or_are_forgotten(leaves_early):
    workers = Obedient()
    workers.may.set()
    runner, blocks = new_runner(workers), BlockManager(6, 4)
    host = Host(runner.new_swap(blocks))
    scheduler = ChunkedScheduler(blocks, host=host, max_num_seqs=2, max_num_batched_tokens=16)
    common = dict(max_new_tokens=12, sampling=None, stop_token_ids=frozenset())
    sequences = [EngineSequence(row=row, prompt=[1] * 9, **common) for row in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.host.swap.away:
        step = scheduler.schedule()
        for sequence in scheduler.finish(step):
            sequence.append(3)
    last = sequences[1]
    assert list(scheduler.host.swap.away) == [1]
    if leaves_early:
        scheduler.abort(last)
        scheduler.abort(last)  # once is enough
    else:
        scheduler.abort(sequences[0])
        step = scheduler.schedule()
        assert [chunk.sequence for chunk in step.chunks] == [last]
    assert not scheduler.host.swap.away
    runner.talk.ask("num_away")
    (out, (row, old)), (back, told), _ = workers.heard
    assert (out, row, len(old)) == ("swap_out", 1, 3)
    if leaves_early:
        assert (back, told) == ("forget", (1,))
    else:
        assert back == "swap_in" and told[0] == 1
        assert told[1] == blocks.tables[1][:3] and len(told[1]) == 3
    assert scheduler.host.swap.swapped_bytes == (1 if leaves_early else 2) * 3 * 4 * 64
    runner.close()
