"""The searches of one call of LLM.beam_search: as many at once as the engine has room for."""

from tqdm.auto import tqdm

from reference.engine.engine import Engine
from reference.features.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams


def search_all(
    engine: Engine, prompts: list, params: BeamSearchParams, adapters: list, use_tqdm: bool
) -> list[BeamSearchOutput]:
    """The answers, in the order of the prompts. adapters: a LoRARequest or None for each. Raises
    ValueError for a prompt that cannot be served, or while requests are unfinished.
    """
    searching, searches = BeamSearch(engine, params), []
    try:
        for prompt, adapter in zip(prompts, adapters):
            try:
                searches.append(searching.new_search(prompt, adapter))
            except ValueError as error:
                raise ValueError(f"prompts[{len(searches)}]: {error}") from None
        waiting = searches
        with tqdm(total=len(searches), desc="searches", disable=not use_tqdm) as bar:
            while group := searching.next_group(waiting):
                searching.run(group)
                waiting = waiting[len(group) :]
                bar.update(len(group))
    finally:
        for search in searches:
            searching.let_go(search)
    return [search.output(engine.tokenizer) for search in searches]
