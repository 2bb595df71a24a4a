"""lm-eval's own command line, in which the model `kvq` is known.

python -m kvq_calib.lm_eval --model kvq --model_args pretrained=demo,recipe=higgs-2bit --tasks hellaswag
"""

import runpy

from lm_eval.api.registry import model_registry

# lm-eval reads no entry points, and imports a model when it is asked for
model_registry.register("kvq", target="kvq_calib.lm_eval.model:CompressedLM")

if __name__ == "__main__":
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
