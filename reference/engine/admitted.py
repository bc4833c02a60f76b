"""What lesson 22's admission control asks of an engine: who waits, and how much they may take."""

from lessons.l22_serving.admission import Queue, Waiting
from lessons.l22_serving.engine import queue_of
from reference.engine.engine import Engine
from reference.engine.request import EngineSequence


def queue_of_all(engines: list[Engine]) -> Queue:
    """The queues of an engine's replicas as one."""
    queues = [queue_of(engine.scheduler, waiting_one) for engine in engines]
    waiting = [one for queue in queues for one in queue.waiting]
    return Queue(waiting, sum(queue.free_places for queue in queues))


def waiting_one(sequence: EngineSequence) -> Waiting:
    """What admission asks of a sequence that waits: its prompt, and what its request may
    generate.
    """
    request = sequence.request
    prompt_tokens = len(request.prompt_token_ids)
    return Waiting(request.user, prompt_tokens, request.most_tokens - prompt_tokens)
