"""The course as an installed package: `inference-ladder start FOLDER`, then learn there."""

__version__ = "0.1.0"
