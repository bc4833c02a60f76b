"""The one import of every file that holds a kernel:

    from lessons.toolbox.kernels.triton_ import tl, triton

    @triton.jit
    def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr): ...

It gives the real modules, and makes the file work on every machine:

- with a CUDA device the kernels are compiled, as after `import triton`;
- with LADDER_CHIP=80 they are compiled for that chip, and `toolbox.gpu` runs what the compiler
  made, on the CPU;
- without either they run in Triton's interpreter, mended by `lessons.toolbox.kernels.interpreter`
  to round as a GPU does;
- without Triton (macOS, Windows) the file still imports, so that its PyTorch parts, its
  documentation and its source can be used; launching a kernel raises one line that says so.

Rules for kernel files: this import instead of `import triton`; at module level nothing but
decorators, `tl.constexpr` values and `triton.Config`s; wrappers take the device from their
arguments. Gluon is never interpreted: without a GPU `lessons.toolbox.gpu` runs its compiled
code (`gluon.on_the_machine`).
"""

from lessons.toolbox.measure.device import compiled_chip, has_triton, interpreting


class TritonMissing(RuntimeError):
    """A kernel was launched where Triton is not installed."""


class _Absent:
    """Stands for anything of Triton where it is not installed: may be named, called and used to
    decorate, never launched.
    """

    def __init__(self, name: str, fn=None):
        self.__name__ = name
        self.fn = fn  # the undecorated Python function of a kernel

    def __getattr__(self, name: str) -> "_Absent":
        # pickle, copy and inspect ask for optional protocols: they are not there
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs) -> "_Absent":
        decorated = args[0] if len(args) == 1 and not kwargs else None
        # @triton.autotune(...) above @triton.jit
        if isinstance(decorated, _Absent) and decorated.fn is not None:
            return decorated
        if callable(decorated) and not isinstance(decorated, _Absent):  # @triton.jit
            return _Absent(decorated.__name__, decorated)
        return self

    def __getitem__(self, grid):
        raise TritonMissing(
            f"Triton is not installed, so kernel {self.__name__!r} cannot run: "
            "on Linux `pip install triton`, elsewhere use the lesson's naive.py"
        )


class _Constexpr:
    """tl.constexpr: an annotation, and a constant at module level whose value counts for a kernel's
    hash.
    """

    def __init__(self, value):
        self.value = value


if has_triton():
    import triton
    import triton.experimental.gluon.language
    import triton.language as tl

    # triton.language.core as the compiler wants it: an interpreted kernel leaves it changed behind.
    # Gluon takes its functions from there, so it is imported above, before any kernel runs.
    COMPILED = dict(vars(tl.core))

    if interpreting():
        from lessons.toolbox.kernels import order  # noqa: F401  registers its patch
        from lessons.toolbox.kernels.interpreter import make_faithful
        from lessons.toolbox.kernels.spared import spare

        make_faithful()
        spare()
    elif compiled_chip():
        from lessons.toolbox.gpu.triton_driver import install

        install(compiled_chip())
else:
    triton, tl = _Absent("triton"), _Absent("tl")
    tl.constexpr = _Constexpr
    triton.cdiv = lambda x, y: -(-x // y)
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()

__all__ = ["tl", "triton"]
