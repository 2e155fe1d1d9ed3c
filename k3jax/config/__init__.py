"""The configuration of a model: what defines the computation, read from and written to the official config.json.

    model         K3Config
    parts         the configs of its layers
    reader        config.json to what K3Config needs; a field that is unknown, missing or contradicts another is refused
    writer        K3Config to config.json
    quantization  the MXFP4 section of it
    fields        a JSON object of which every field must be known
"""

from k3jax.config.fields import ConfigError as ConfigError
from k3jax.config.model import REMAT_POLICIES as REMAT_POLICIES
from k3jax.config.model import K3Config as K3Config
from k3jax.config.parts import AttentionKind as AttentionKind
from k3jax.config.parts import FeedForwardKind as FeedForwardKind
from k3jax.config.parts import KDAConfig as KDAConfig
from k3jax.config.parts import MLAConfig as MLAConfig
from k3jax.config.parts import MoEConfig as MoEConfig
from k3jax.config.parts import VisionConfig as VisionConfig
