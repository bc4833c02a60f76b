"""In a browser: what stands for modules that do not run there, such as PyTorch."""


class Elsewhere:
    """A name of such a module. It may be passed on, stand in annotations and decorate, as happens
    while a file is read. Whatever would compute with it fails.
    """

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> "Elsewhere":
        if name.startswith("__"):
            raise AttributeError(name)
        return Elsewhere(f"{self.name}.{name}")

    def __call__(self, *arguments, **named) -> "Elsewhere":
        return self

    def __getitem__(self, index) -> "Elsewhere":
        return self

    def __iter__(self):
        raise RuntimeError(f"{self.name} does not run in a browser")

    def __or__(self, other) -> "Elsewhere":
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        raise RuntimeError(f"{self.name} does not run in a browser")
