"""LoRA (arXiv 2106.09685): many adapters at once in one pool of rank columns per projection.

    adapters      the adapters of a model
    targets       which projections an adapter names
    peft peft_config  PEFT's files
    merge         an adapter folded into the weights, bf16 or MXFP4
"""

from k3jax.lora.adapters import Adapter as Adapter
from k3jax.lora.adapters import Adapters as Adapters
from k3jax.lora.adapters import LoRAConfig as LoRAConfig
from k3jax.lora.adapters import Placed as Placed
from k3jax.lora.peft import load_peft as load_peft
from k3jax.lora.peft import save_peft as save_peft
