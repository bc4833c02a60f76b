"""Where adapters are stored: all of them on the host, those that run in slots on the device.

    disk ──load──▶ host (AdapterStore, max_cpu_loras) ──copy──▶ slots (AdapterSlots, max_loras)

Both levels throw away the least recently used first, and neither throws away what is in use. That
is counted: a request acquires its adapter and releases it again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lessons.l21_multi_lora.batch import NO_ADAPTER
from lessons.l21_multi_lora.layers import LoRALinear
from lessons.l21_multi_lora.peft.adapters import Adapter, check_complete, in_order_of, load_adapter
from lessons.toolbox.model.arguments import check_kind, is_whole, refuse
from lessons.toolbox.model.config import ModelConfig


@dataclass
class Traffic:
    """What the slots have done."""

    loads: int = 0  # adapters copied to the device
    evictions: int = 0
    loaded_bytes: int = 0


class AdapterSlots:
    """The adapters on the device, one a slot. layers: of the model (`adapter_layers`), which all
    have the same number of slots.
    """

    def __init__(self, layers: dict[str, LoRALinear]):
        self.layers = layers
        if layers:  # none where other processes hold them
            self.num_slots, self.max_rank, _ = next(iter(layers.values())).weights.a.shape
        self.slot_of: OrderedDict[Adapter, int] = OrderedDict()  # least recently used first
        self.users: Counter[Adapter] = Counter()
        self.free = list(range(self.num_slots))[::-1]
        self.traffic = Traffic()

    def acquire(self, adapter: Adapter) -> int:
        """The adapter's slot, its matrices in it until `release`. Raises ValueError if all slots
        are in use, or if its rank is too large for them.
        """
        if adapter.rank > self.max_rank:
            refuse("rank of the adapter", adapter.rank, f"at most {self.max_rank} (max_lora_rank)")
        if adapter not in self.slot_of:
            self.slot_of[adapter] = self.copy_in(adapter, self.take_slot())
        self.slot_of.move_to_end(adapter)
        self.users[adapter] += 1
        return self.slot_of[adapter]

    def release(self, adapter: Adapter) -> None:
        """One user fewer. The matrices stay until another adapter needs the slot."""
        if self.users[adapter] < 1:
            refuse("adapter", adapter.name, "one that was acquired")
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]

    @contextmanager
    def held(self, adapters: Iterable[Adapter | None]) -> Iterator[list[int]]:
        """The slot of each row's adapter, −1 for None; all are held inside the block."""
        acquired = []
        try:
            slots = {None: NO_ADAPTER}
            rows = list(adapters)
            for adapter in dict.fromkeys(rows):
                if adapter is not None:
                    slots[adapter] = self.acquire(adapter)
                    acquired.append(adapter)
            yield [slots[adapter] for adapter in rows]
        finally:
            for adapter in acquired:
                self.release(adapter)

    def drop(self, adapter: Adapter) -> None:
        """Empty the adapter's slot, if it has one. Raises ValueError while it is in use."""
        if self.users[adapter]:
            refuse("adapter", adapter.name, "one that no request uses")
        slot = self.slot_of.pop(adapter, None)
        if slot is not None:
            self.clear(slot)
            self.free.append(slot)

    def take_slot(self) -> int:
        """A free slot, or that of the least recently used adapter that no request uses."""
        if self.free:
            return self.free.pop()
        idle = next((adapter for adapter in self.slot_of if not self.users[adapter]), None)
        if idle is None:
            used = len(self.slot_of) + 1
            refuse("adapters of one step", used, f"at most {self.num_slots} (max_loras)")
        self.traffic.evictions += 1
        return self.slot_of.pop(idle)

    def copy_in(self, adapter: Adapter, slot: int) -> int:
        """An adapter into a slot of every layer, in the layers' dtype; returns the slot."""
        for name, layer in self.layers.items():
            pair = adapter.layers.get(name)
            if pair is None:  # of the adapter that was here before
                layer.weights.clear(slot)
            else:
                layer.weights.put(slot, *pair)
        self.traffic.loads += 1
        self.traffic.loaded_bytes += adapter.num_bytes
        return slot

    def clear(self, slot: int) -> None:
        for layer in self.layers.values():
            layer.weights.clear(slot)


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request wants, as vLLM names it. lora_int_id: the caller's number for it, 1
    or more. lora_path: the folder that PEFT's save_pretrained wrote.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self):
        check_kind(str, "a name", lora_name=self.lora_name)
        if not self.lora_name:
            refuse("lora_name", self.lora_name, "a name")
        if not is_whole(self.lora_int_id):
            refuse("lora_int_id", self.lora_int_id, "a whole number, 1 or more and below 2**31")


class AdapterStore:
    """The adapters on the host, by their ids. A request takes one when it comes, and gives it back
    when it ends. What a request has taken stays, whatever becomes of the folder and of the id.

    linears: {layer: (N, K)} of the model. max_cpu_loras: adapters that are kept while no request
    needs them; more are kept while they are needed. config: of the model; None: its rows are where
    adapters have them.
    """

    def __init__(
        self,
        linears: dict[str, tuple[int, int]],
        max_lora_rank: int,
        max_cpu_loras: int,
        load: Callable = load_adapter,
        config: ModelConfig | None = None,
    ):
        self.config = config
        self.linears, self.max_lora_rank = linears, max_lora_rank
        self.max_cpu_loras, self.load = max_cpu_loras, load
        # least recently used first; what was deleted while in use is in `users` alone
        self.known: OrderedDict[int, tuple[LoRARequest, Adapter]] = OrderedDict()
        self.users: Counter[Adapter] = Counter()

    def take(self, request: LoRARequest) -> Adapter:
        """The adapter, read from disk if it is not here. Raises ValueError for one that cannot be
        read, that does not fit the model, or whose id belongs to a different one.
        """
        check_kind(LoRARequest, "LoRARequest", lora_request=request)
        known = self.known.get(request.lora_int_id)
        if known is None:
            adapter = self.read(request)
            self.known[request.lora_int_id] = request, adapter
        elif known[0] == request:
            adapter = known[1]
        else:
            raise ValueError(
                f"lora_int_id: got {request.lora_int_id} for {request.lora_name!r} in "
                f"{request.lora_path!r}; accepted: another number, because it is "
                f"{known[0].lora_name!r} in {known[0].lora_path!r}"
            )
        self.known.move_to_end(request.lora_int_id)
        self.users[adapter] += 1
        self.shrink()
        return adapter

    def give_back(self, adapter: Adapter) -> None:
        """One request fewer needs it."""
        if self.users[adapter] < 1:
            refuse("adapter", adapter.name, "one that was taken")
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
        self.shrink()

    def remove(self, lora_int_id: int) -> bool:
        """Forget an id. Requests that have taken its adapter end with it; the next request with
        this id reads its folder anew. Returns whether the id was known.
        """
        return self.known.pop(lora_int_id, None) is not None

    def read(self, request: LoRARequest) -> Adapter:
        """From disk. Raises ValueError."""
        adapter = self.load(request.lora_path, request.lora_name)
        if adapter.rank > self.max_lora_rank:
            raise ValueError(
                f"max_lora_rank: got {self.max_lora_rank} and adapter {adapter.name!r} of rank "
                f"{adapter.rank}; accepted: {adapter.rank} or more for this adapter"
            )
        check_complete(request.lora_path, adapter, self.linears)
        return adapter if self.config is None else in_order_of(adapter, self.config)

    def shrink(self) -> None:
        """Forget those that were not used for longest, until max_cpu_loras are left."""
        idle = [id for id, (_, adapter) in self.known.items() if not self.users[adapter]]
        for id in idle[: max(0, len(self.known) - self.max_cpu_loras)]:
            del self.known[id]
