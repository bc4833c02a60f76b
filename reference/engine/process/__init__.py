"""An engine in a process of its own, so that no thread that reads or writes HTTP takes Python's
lock from it.

Read `client`, which is in the server's process and has AsyncLLMEngine's interface; then `core`,
which is in the other one. `messages` is what goes through the pipe between them.

Source: vLLM, vllm/v1/engine/core_client.py and core.py, which do it through ZeroMQ.
"""
