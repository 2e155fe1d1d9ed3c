"""Generation: prefill once per prompt, fork for n samples, decode on the device.

    sampler       the Sampler
    params        what a request asks for, what it gets
    drafts        a request while it is answered
    requests      what callers hand over, checked
    sessions      kept states, found by the tokens they absorbed
    steps distribution  the compiled programs; the distribution that is drawn from
    text          stop strings
    live          weights that training changes between calls
"""

from k3jax.sampling.params import Routes as Routes
from k3jax.sampling.params import Sample as Sample
from k3jax.sampling.params import SamplingParams as SamplingParams
from k3jax.sampling.params import replay as replay
from k3jax.sampling.sampler import Sampler as Sampler
