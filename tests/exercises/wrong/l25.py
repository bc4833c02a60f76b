"""Wrong answers to lesson 25's exercises: slips of loops that run ahead, and the hint for each."""

from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 25.1 two time lines

answers.slips(
    "25.1",
    """
    waits_for_the_last_step: One step ahead, the host needs the tokens of step n - 2, not of n - 1.
    - told = ahead[n - 2] if n >= 2 else 0.0
    + told = ahead[n - 1] if n >= 1 else 0.0

    never_waits: The host may not run away: it begins with step n when step n - 2 has ended.
    - told = ahead[n - 2] if n >= 2 else 0.0
    + told = 0.0

    two_steps_ahead: You let the host be two steps ahead.
    - told = ahead[n - 2] if n >= 2 else 0.0
    + told = ahead[n - 3] if n >= 3 else 0.0

    host_in_two_places: The host does one thing after the other: it has to have launched step n - 1.
    - launched = max(launched, told) + host
    + launched = told + host

    device_before_its_launch: The device cannot begin with a step that is not launched.
    - ahead.append(max(launched, is_free) + device)
    + ahead.append(max(is_free, host if n == 0 else 0.0) + device)

    two_passes_at_once: The device runs one pass after the other.
    - ahead.append(max(launched, is_free) + device)
    + ahead.append(launched + device)

    host_for_nothing: The first launch takes the host's time, too.
    - launched = max(launched, told) + host
    + launched = max(launched, told) + (host if n else 0.0)

    a_first_step_is_taken_for_granted: There may be no step at all: then both lists are empty.
    - now = launched = 0.0
    + now = launched = 0.0
    + host_ms[0]

    runs_at_launch: You wrote down when the device begins with a step. When does it end?
    - ahead.append(max(launched, is_free) + device)
    + ahead.append(max(launched, is_free))

    serial_overlaps: One after the other, the device waits for the host in every step.
    - now += host + device
    + now += max(host, device) if n else host + device
    """,
)


@answers.wrong("25.1", "A step may wait for the host and the next for the device: follow both.")
def longer_of_the_two(host_ms, device_ms):
    serial, ahead = [], []
    for n, (host, device) in enumerate(zip(host_ms, device_ms)):
        serial.append((serial[-1] if n else 0.0) + host + device)
        ahead.append(ahead[-1] + max(host, device) if n else host + device)
    return serial, ahead


@answers.wrong("25.1", "The lists are turned round: one after the other comes first.")
def turned_round(host_ms, device_ms):
    return tuple(reversed(by_recursion(host_ms, device_ms)))


@answers.alternative("25.1")
def by_recursion(host_ms, device_ms):
    """Both ends of a step from those of the steps before it."""

    def ends(lead):
        found, launched = [], []
        for n, (host, device) in enumerate(zip(host_ms, device_ms)):
            seen = found[n - 1 - lead] if n > lead else 0.0
            launched.append(max(launched[-1] if launched else 0.0, seen) + host)
            found.append(max(launched[-1], found[-1] if found else 0.0) + device)
        return found

    return ends(0), ends(1)


@answers.alternative("25.1")
def with_two_clocks(host_ms, device_ms):
    serial = [sum(host_ms[: n + 1]) + sum(device_ms[: n + 1]) for n in range(len(host_ms))]
    host_at = device_at = device_before = 0.0
    ahead = []
    for host, device in zip(host_ms, device_ms):
        host_at = max(host_at, device_before) + host
        device_before, device_at = device_at, max(host_at, device_at) + device
        ahead.append(device_at)
    return serial, ahead


# ---------------------------------------------------------------- 25.2 the loop

answers.slips(
    "25.2",
    """
    extra_token_kept: A request that has ended gets no more tokens: its late one is thrown away.
    - if answers[request][-1:] != [stop]:
    -     answers[request].append(token)
    + answers[request].append(token)

    one_token_too_many: One token of each request is on its way: count it, or a pass is wasted.
    - len(answers[request]) + 1 < limits[request]
    + len(answers[request]) < limits[request]

    one_token_too_few: A request with one token on its way may still want the next.
    - len(answers[request]) + 1 < limits[request]
    + len(answers[request]) + 2 < limits[request]

    ended_ones_go_on: A request that the stop token has ended leaves the batch.
    - len(answers[request]) + 1 < limits[request] and answers[request][-1:] != [stop]
    + len(answers[request]) + 1 < limits[request]

    rows_are_requests: A row is a place in the pass before, not the number of a request.
    - [running.index(request) for request in ahead]
    + list(ahead)

    first_rows: Those who go on are not the first rows of the pass before.
    - [running.index(request) for request in ahead]
    + list(range(len(ahead)))

    reads_the_newest: Read the pass before, not the one that you have just launched.
    - device.read(before)
    + device.read(before if launched is None else launched)

    by_limit: All requests begin together, in the order of `first`. You sorted them.
    - launched = device.start(first) if first else None
    + running.sort(key=lambda request: limits[request])
    + launched = device.start([first[request] for request in running]) if first else None

    starts_without_rows: Without a request there is no pass: one without rows is launched for
        nothing.
    - device.start(first) if first else None
    + device.start(first)

    passes_without_rows: When all requests have ended there is no next pass.
    - if ahead:
    + if True:

    prompt_is_answer: The answer begins with the first token that the device says, not with the
        prompt's last one.
    - [[] for _ in first]
    + [[token] for token in first]

    tokens_to_the_new_rows: The tokens that you read are of the old pass, and so are their rows.
    - for request, token in zip(running, device.read(before)):
    + for request, token in zip(ahead or running, device.read(before)):
    """,
)


@answers.wrong("25.2", "You read a pass before you launch the next: the device waits for you.")
def one_after_the_other(device, first, limits, stop):
    answers_, running = [[] for _ in first], list(range(len(first)))
    launched = device.start(first) if first else None
    while running:
        for request, token in zip(running, device.read(launched)):
            answers_[request].append(token)
        going = [r for r in running if len(answers_[r]) < limits[r] and answers_[r][-1:] != [stop]]
        if going:
            launched = device.follow([running.index(request) for request in going])
        running = going
    return answers_


@answers.wrong("25.2", "The stop token is the answer's last token: it is kept.")
def without_the_stop_token(device, first, limits, stop):
    found = with_a_queue(device, first, limits, stop)
    return [answer[:-1] if answer[-1:] == [stop] else answer for answer in found]


@answers.wrong("25.2", "Launching all passes first wastes every pass after a stop token.")
def all_passes_first(device, first, limits, stop):
    if not first:
        return []
    running, launched = list(range(len(first))), [device.start(first)]
    rows = [running]
    for count in range(1, max(limits)):
        going = [request for request in running if limits[request] > count]
        launched.append(device.follow([running.index(request) for request in going]))
        rows.append(going)
        running = going
    answers_ = [[] for _ in first]
    for requests, one in zip(rows, launched):
        for request, token in zip(requests, device.read(one)):
            if answers_[request][-1:] != [stop]:
                answers_[request].append(token)
    return answers_


@answers.alternative("25.2")
def with_a_queue(device, first, limits, stop):
    """Passes in flight as a list of (which requests, what was launched)."""
    found = {request: [] for request in range(len(first))}
    ended, counts = set(), dict.fromkeys(found, 1)
    flight = [(list(found), device.start(first))] if first else []
    while flight:
        requests, launched = flight[0]
        going = [r for r in requests if r not in ended and counts[r] < limits[r]]
        if going:
            places = {request: place for place, request in enumerate(requests)}
            flight.append((going, device.follow([places[r] for r in going])))
            counts.update({r: counts[r] + 1 for r in going})
        for request, token in zip(requests, device.read(launched)):
            if request not in ended:
                found[request].append(token)
                if token == stop:
                    ended.add(request)
        flight.pop(0)
    return list(found.values())


@answers.alternative("25.2")
def by_masks(device, first, limits, stop):
    """A flag for each request; the answers are cut at the end."""
    raw, alive = [[] for _ in first], [True] * len(first)
    rows, launched = list(range(len(first))), device.start(first) if first else None
    while rows:
        following = [r for r in rows if alive[r] and len(raw[r]) + 1 < limits[r]]
        where = [place for place, r in enumerate(rows) if r in following]
        after = device.follow(where) if where else None
        for r, token in zip(rows, device.read(launched)):
            raw[r].append(token)
            alive[r] = alive[r] and token != stop
        rows, launched = following, after
    cut = [answer.index(stop) + 1 if stop in answer else len(answer) for answer in raw]
    return [answer[:end] for answer, end in zip(raw, cut)]
