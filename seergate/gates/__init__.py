"""Gates without a model: modules, checkpoint files, model card, download and upload."""

from __future__ import annotations

from seergate.gates.bank import Gates
from seergate.gates.card import CARD_FILE, Source
from seergate.gates.files import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, read_adapter, read_card, save_adapter
from seergate.gates.hub import base_note, check_target, fetch, licence_of_base, push_adapter
from seergate.gates.record import SCHEMA_VERSION
