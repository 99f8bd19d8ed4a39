"""The PTX instructions that the kernels use, one Python function each.

Addresses of global memory are `Int64` byte addresses, addresses of shared memory `Int32` byte addresses
in the shared window. Loads are marked as having side effects so that the compiler keeps them behind the
barrier that makes their data visible; ptxas still schedules them freely where that is safe.
"""

from .arithmetic import (
    and_or as and_or,
)
from .arithmetic import (
    bit as bit,
)
from .arithmetic import (
    bits_float as bits_float,
)
from .arithmetic import (
    find_first_set as find_first_set,
)
from .arithmetic import (
    float_bits as float_bits,
)
from .arithmetic import (
    here as here,
)
from .arithmetic import (
    match_any as match_any,
)
from .arithmetic import (
    max_nan as max_nan,
)
from .arithmetic import (
    min_nan as min_nan,
)
from .arithmetic import (
    mma_m16n8k16 as mma_m16n8k16,
)
from .arithmetic import (
    mul_bf16x2 as mul_bf16x2,
)
from .arithmetic import (
    mul_bf16x2_by_half as mul_bf16x2_by_half,
)
from .arithmetic import (
    pack_bf16x2 as pack_bf16x2,
)
from .arithmetic import (
    prmt as prmt,
)
from .arithmetic import (
    rotate_right as rotate_right,
)
from .arithmetic import (
    warp_or as warp_or,
)
from .asynchronous import (
    bulk_load as bulk_load,
)
from .asynchronous import (
    bulk_load_cached as bulk_load_cached,
)
from .asynchronous import (
    cp_async16 as cp_async16,
)
from .asynchronous import (
    cp_async_arrive as cp_async_arrive,
)
from .asynchronous import (
    cp_async_commit as cp_async_commit,
)
from .asynchronous import (
    cp_async_wait as cp_async_wait,
)
from .asynchronous import (
    dependents_may_start as dependents_may_start,
)
from .asynchronous import (
    evict_first_policy as evict_first_policy,
)
from .asynchronous import (
    fence_async_shared as fence_async_shared,
)
from .asynchronous import (
    mbarrier_arrive as mbarrier_arrive,
)
from .asynchronous import (
    mbarrier_arrive_if as mbarrier_arrive_if,
)
from .asynchronous import (
    mbarrier_expect as mbarrier_expect,
)
from .asynchronous import (
    mbarrier_init as mbarrier_init,
)
from .asynchronous import (
    mbarrier_init_fence as mbarrier_init_fence,
)
from .asynchronous import (
    mbarrier_wait as mbarrier_wait,
)
from .asynchronous import (
    wait_for_predecessor as wait_for_predecessor,
)
from .global_memory import (
    acquire32 as acquire32,
)
from .global_memory import (
    ldg8 as ldg8,
)
from .global_memory import (
    ldg16 as ldg16,
)
from .global_memory import (
    ldg32 as ldg32,
)
from .global_memory import (
    ldg64 as ldg64,
)
from .global_memory import (
    ldg64_once as ldg64_once,
)
from .global_memory import (
    ldg128 as ldg128,
)
from .global_memory import (
    ldg_f32 as ldg_f32,
)
from .global_memory import (
    ldg_f32x4 as ldg_f32x4,
)
from .global_memory import (
    ldg_f32x4_uncached as ldg_f32x4_uncached,
)
from .global_memory import (
    release32 as release32,
)
from .global_memory import (
    stg8 as stg8,
)
from .global_memory import (
    stg16 as stg16,
)
from .global_memory import (
    stg32 as stg32,
)
from .global_memory import (
    stg64 as stg64,
)
from .global_memory import (
    stg128 as stg128,
)
from .global_memory import (
    stg_f32 as stg_f32,
)
from .shared_memory import (
    atom_add_shared as atom_add_shared,
)
from .shared_memory import (
    lds16 as lds16,
)
from .shared_memory import (
    lds32 as lds32,
)
from .shared_memory import (
    lds64 as lds64,
)
from .shared_memory import (
    lds128 as lds128,
)
from .shared_memory import (
    lds_f32x4 as lds_f32x4,
)
from .shared_memory import (
    lds_target as lds_target,
)
from .shared_memory import (
    or_shared as or_shared,
)
from .shared_memory import (
    patch_pairs as patch_pairs,
)
from .shared_memory import (
    store_transposed2 as store_transposed2,
)
from .shared_memory import (
    store_transposed4 as store_transposed4,
)
from .shared_memory import (
    sts32 as sts32,
)
from .shared_memory import (
    sts64 as sts64,
)
from .shared_memory import (
    sts_f32x4 as sts_f32x4,
)
from .shared_memory import (
    sts_target as sts_target,
)
from .warpgroup import (
    STEP as STEP,
)
from .warpgroup import (
    descriptors as descriptors,
)
from .warpgroup import (
    products_of_64 as products_of_64,
)
from .warpgroup import (
    rows_descriptor as rows_descriptor,
)
from .warpgroup import (
    shares as shares,
)
from .warpgroup import (
    width_digits as width_digits,
)
