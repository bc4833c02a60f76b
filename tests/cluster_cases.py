"""Small traces, and a deployment whose seconds add up exactly: shared by the tests of the
simulator.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lessons.l14_continuous_batching.lab.cost import StepCost
from lessons.l26_kv_transfer.costs import Token
from reference.simulator.costs import Deployment, FittedCost
from reference.simulator.traces import TracedRequest

COST = StepCost(
    fixed_s=1.0, token_s=0.25, context_s=2**-6
)  # sums of these are exact, so that times are equal
SIZE = 4  # tokens of a block
# (seconds since the one before, prompt tokens, answer tokens, prefix, prefix tokens)
LINES = st.tuples(
    st.sampled_from([0, 0, 0.5, 1, 3, 40]),
    st.integers(1, 24),
    st.integers(1, 20),
    st.sampled_from([None, None, "a", "b"]),
    st.integers(1, 24),
)
TRACES = st.lists(LINES, min_size=1, max_size=12)
BLOCKS = st.sampled_from([11, 14, 20, 60])


def examples(count: int, **more):
    """So many examples."""
    return settings(
        deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow], **more
    )


def how_many(request) -> int:
    """Examples of a run, many with --all."""
    return 5000 if request.config.getoption("--all") else 200


def deployment(num_blocks: int) -> Deployment:
    return Deployment("test", FittedCost(COST), num_blocks, token=Token(1e9, 1.0), block_size=SIZE)


def trace_of(lines, with_prefixes: bool = True) -> list[TracedRequest]:
    now_s, trace = 0.0, []
    for gap_s, prompt, output, prefix, shared in lines:
        now_s += gap_s
        name = prefix if with_prefixes else None
        shared = min(prompt, shared) if name else 0
        trace.append(TracedRequest(now_s, prompt, output, name, shared))
    return trace
