"""Official checkpoints: load, save, look into (`python -m k3jax.weights inspect`), convert.

    checkpoint    load and save
    names         parameters of the model <-> names of tensors
    reader writer safetensors files, streaming
    match         missing and unexpected tensors, each with its nearest match
    quant         MXFP4 on the host
    inspect convert  the two commands
"""

from k3jax.weights.checkpoint import abstract as abstract
from k3jax.weights.checkpoint import load as load
from k3jax.weights.checkpoint import save as save
