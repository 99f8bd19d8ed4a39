"""Asynchronous copies, their barriers, and order among launches."""

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from .core import asm, word


@dsl_user_op
def mbarrier_init(address, count, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(count, loc, ip)]
    asm(None, operands, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_init_fence(*, loc=None, ip=None):
    """Makes initialised barriers visible to the asynchronous proxy."""
    asm(None, [], "fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;", "", True, loc, ip)


@dsl_user_op
def mbarrier_expect(address, count, *, loc=None, ip=None):
    """Arrives and announces `count` bytes of asynchronous copies."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(count, loc, ip)]
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    asm(None, operands, text, "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_wait(address, phase, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(phase, loc, ip)]
    text = (
        "{ .reg .pred p;\n WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
        " @p bra DONE;\n bra WAIT;\n DONE: }"
    )
    asm(None, operands, text, "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_arrive(address, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    asm(None, operands, "mbarrier.arrive.shared::cta.b64 _, [$0];", "r", True, loc, ip)


@dsl_user_op
def mbarrier_arrive_if(address, condition, *, loc=None, ip=None):
    """Arrives where `condition` is not zero, without a branch: branches make ptxas serialise `wgmma`."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), word(condition, loc, ip)]
    text = "{ .reg .pred p;\n setp.ne.u32 p, $1, 0;\n @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    asm(None, operands, text, "r,r", True, loc, ip)


@dsl_user_op
def cp_async_arrive(address, *, loc=None, ip=None):
    """Arrives at an mbarrier once this thread's copies so far are complete."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    asm(None, operands, "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", True, loc, ip)


@dsl_user_op
def bulk_load_cached(destination, source, count, barrier, *, loc=None, ip=None):
    """As `bulk_load`, of data that other CTAs read, too: it stays in L2."""
    operands = [
        Int32(destination).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        word(count, loc, ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
    ]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(None, operands, text, "r,l,r,r", True, loc, ip)


@dsl_user_op
def fence_async_shared(*, loc=None, ip=None):
    """Makes this thread's earlier writes to shared memory visible to matrix instructions and bulk copies."""
    asm(None, [], "fence.proxy.async.shared::cta;", "", True, loc, ip)


@dsl_user_op
def bulk_load(destination, source, count, barrier, policy, *, loc=None, ip=None):
    """Copies `count` bytes (multiple of 16) from global to shared memory; completes on an mbarrier."""
    operands = [
        Int32(destination).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        word(count, loc, ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
        Int64(policy).ir_value(loc=loc, ip=ip),
    ]
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[$0], [$1], $2, [$3], $4;"
    )
    asm(None, operands, text, "r,l,r,r,l", True, loc, ip)


@dsl_user_op
def evict_first_policy(*, loc=None, ip=None):
    """L2 policy for data that is read once: weights should not push activations out."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
    return Int64(asm(T.i64(), [], text, "=l", False, loc, ip))


@dsl_user_op
def cp_async16(destination, source, *, loc=None, ip=None):
    operands = [Int32(destination).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)]
    asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l", True, loc, ip)


@dsl_user_op
def cp_async_commit(*, loc=None, ip=None):
    asm(None, [], "cp.async.commit_group;", "", True, loc, ip)


@dsl_user_op
def cp_async_wait(pending: int, *, loc=None, ip=None):
    """Waits until at most `pending` groups of this thread's copies are under way."""
    asm(None, [], f"cp.async.wait_group {pending};", "", True, loc, ip)


# ---- order among launches ------------------------------------------------------------------------


@dsl_user_op
def dependents_may_start(*, loc=None, ip=None):
    asm(None, [], "griddepcontrol.launch_dependents;", "", True, loc, ip)


@dsl_user_op
def wait_for_predecessor(*, loc=None, ip=None):
    """Waits until the grid before this one in the stream is complete and its writes are visible."""
    asm(None, [], "griddepcontrol.wait;", "", True, loc, ip)
