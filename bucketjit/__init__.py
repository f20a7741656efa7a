"""JAX on ragged data: one executable per bucket of sizes, with the masks derived for you.

>>> import jax.numpy as jnp, numpy as np
>>> import bucketjit
>>> norm = bucketjit.BucketedExec(jnp.linalg.norm).with_pow2()
>>> round(float(norm(np.ones(9, np.float32))), 3)
3.0
"""

from bucketjit import metrics as metrics
from bucketjit import stages as stages
from bucketjit import strategies as strategies
from bucketjit._api.decorator import jit as jit
from bucketjit._api.executor import BucketedExec as BucketedExec
from bucketjit._api.loaded import Loaded as Loaded
from bucketjit._api.loaded import load as load
from bucketjit._api.refining import refine as refine
from bucketjit._api.sized import sized as sized
from bucketjit._arrays.padded import Padded as Padded
from bucketjit._compile.budget import CompileGuard as CompileGuard
from bucketjit._compile.cache_store import CacheInfo as CacheInfo
from bucketjit._config import Check as Check
from bucketjit._config import CompileBudget as CompileBudget
from bucketjit._config import Fallback as Fallback
from bucketjit._config import Overflow as Overflow
from bucketjit._errors import ArgumentError as ArgumentError
from bucketjit._errors import ArtifactError as ArtifactError
from bucketjit._errors import BucketJitError as BucketJitError
from bucketjit._errors import BucketOverflowError as BucketOverflowError
from bucketjit._errors import CompileBudgetError as CompileBudgetError
from bucketjit._errors import CompileBudgetWarning as CompileBudgetWarning
from bucketjit._errors import ExportError as ExportError
from bucketjit._errors import FallbackError as FallbackError
from bucketjit._errors import FallbackWarning as FallbackWarning
from bucketjit._errors import MaskingError as MaskingError
from bucketjit._errors import MissingExtraError as MissingExtraError
from bucketjit._errors import PersistenceWarning as PersistenceWarning
from bucketjit._errors import ShapeCheckError as ShapeCheckError
from bucketjit._errors import SizeMismatchError as SizeMismatchError
from bucketjit._errors import SpecError as SpecError
from bucketjit._errors import SplitError as SplitError
from bucketjit._errors import StrategyContractError as StrategyContractError
from bucketjit._errors import StrategyError as StrategyError
from bucketjit._errors import VersionError as VersionError
from bucketjit._errors import VersionWarning as VersionWarning
from bucketjit._events import Event as Event
from bucketjit._inspect.explain import Explanation as Explanation
from bucketjit._inspect.explain import MaskedEquation as MaskedEquation
from bucketjit._inspect.report import Report as Report
from bucketjit._masking.rule_context import RuleContext as RuleContext
from bucketjit._precompile.manifest import Manifest as Manifest
from bucketjit._precompile.report import WarmupReport as WarmupReport
from bucketjit._ragged.explained import MapExplanation as MapExplanation
from bucketjit._ragged.stacked import Ragged as Ragged
from bucketjit._runtime.statistics import BucketStats as BucketStats
from bucketjit._runtime.statistics import ProgramStats as ProgramStats
from bucketjit._runtime.statistics import Stats as Stats
from bucketjit._runtime.timeline import Moment as Moment
from bucketjit._version import __version__ as __version__
