"""Gates: the modules (`gate`, `bank`), what is recorded of them (`record`), their files, their card and the Hub."""

from __future__ import annotations

from seergate.gates.bank import Gates
from seergate.gates.card import CARD_FILE, Source
from seergate.gates.files import CONFIG_FILE, WEIGHTS_FILE, read_card, save_adapter
from seergate.gates.hub import base_note, check_repo_id, fetch, push_adapter
from seergate.gates.merging import AdapterDiff, average, cast, diff, subset
from seergate.gates.record import SCHEMA_VERSION, Adapter, check_adapter
