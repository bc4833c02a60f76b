"""What the engine's process imports, imported once by the server that it is a fork of."""

import reference.engine.process.core
import reference.parallel.warm  # noqa: F401
