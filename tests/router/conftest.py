"""A test of the router is a coroutine: replicas, router and clients share one event loop."""

import asyncio
import inspect

import pytest

pytest.importorskip("fastapi", reason="NOT RUN: fastapi is not installed")
pytest.importorskip("httpx", reason="NOT RUN: httpx is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120))
    return True
