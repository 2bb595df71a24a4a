"""Stand in for torchvision, which SGLang's imports name: nothing of pictures is called by what keeps pages."""

import importlib.machinery
import sys
from unittest.mock import MagicMock

import transformers.utils.import_utils

transformers.utils.import_utils.is_torchvision_available()  # asked before a stand-in is there, and remembered
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
    stand_in = MagicMock(name=name)
    stand_in.__spec__, stand_in.__path__ = importlib.machinery.ModuleSpec(name, None), []
    sys.modules.setdefault(name, stand_in)
