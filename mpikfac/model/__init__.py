"""Handle the user's model and optimizer: their state, and what a step requires of them."""

from __future__ import annotations

from mpikfac.model.checks import check_foreign as check_foreign
from mpikfac.model.checks import check_habits as check_habits
from mpikfac.model.checks import check_kind as check_kind
from mpikfac.model.checks import check_loaded_momentum as check_loaded_momentum
from mpikfac.model.checks import check_momentum as check_momentum
from mpikfac.model.checks import check_optimizer as check_optimizer
from mpikfac.model.checks import check_owned as check_owned
from mpikfac.model.checks import check_plain as check_plain
from mpikfac.model.checks import check_rates as check_rates
from mpikfac.model.checks import check_synchronous as check_synchronous
from mpikfac.model.checks import check_tensors as check_tensors
from mpikfac.model.checks import common_type as common_type
from mpikfac.model.checks import describe as describe
from mpikfac.model.checks import describe_tensors as describe_tensors
from mpikfac.model.checks import groups_of as groups_of
from mpikfac.model.checks import members as members
from mpikfac.model.checks import report_uncovered as report_uncovered
from mpikfac.model.checks import taking_up as taking_up
from mpikfac.model.descent import Descent as Descent
from mpikfac.model.descent import StepGuard as StepGuard
from mpikfac.model.equality import Writes as Writes
from mpikfac.model.equality import check_equal as check_equal
from mpikfac.model.equality import check_written as check_written
from mpikfac.model.equality import checksums as checksums
from mpikfac.model.rows import Joined as Joined
from mpikfac.model.sharded import check_averaged as check_averaged
from mpikfac.model.sharded import check_replicas as check_replicas
from mpikfac.model.sharded import check_wrappers as check_wrappers
from mpikfac.model.sharded import fully_sharded as fully_sharded
from mpikfac.model.sharded import sharding_of as sharding_of
from mpikfac.model.state import MOMENTUM as MOMENTUM
from mpikfac.model.state import fitting as fitting
from mpikfac.model.state import group_settings as group_settings
from mpikfac.model.state import hand_over_state as hand_over_state
from mpikfac.model.state import laid_out as laid_out
from mpikfac.model.state import load_model_state as load_model_state
from mpikfac.model.state import missing_state as missing_state
from mpikfac.model.state import model_state as model_state
from mpikfac.model.state import needed_state as needed_state
from mpikfac.model.state import set_group_setting as set_group_setting
from mpikfac.model.state import settings_in as settings_in
from mpikfac.model.state import unstored_settings as unstored_settings
