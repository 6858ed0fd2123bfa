"""Names with which a family is declared: component, config, layers' parts, and mappers to tensors in files."""

from drawloom.components.model.decoder.branch_specs import *
from drawloom.components.model.decoder.builder import *
from drawloom.components.model.decoder.config import *
from drawloom.components.model.decoder.expert_config import *
from drawloom.components.model.decoder.layer_types import *
from drawloom.components.model.decoder.mapper import *
from drawloom.components.model.decoder.rope import *
from drawloom.components.model.decoder.rope_scaling import *
from drawloom.components.model.decoder.specs import *
from drawloom.components.weights.mapper import *
