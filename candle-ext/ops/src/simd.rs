//! Loops compiled for the vectors of the processor at hand.

/// Runs a loop in a version compiled for the widest vectors that the processor has.
///
/// The compiler vectorises what it sees: `kernel` is a closure marked `#[inline(always)]` with all of the loop in it. (Not
/// marked, it may stay a function of its own, compiled for any processor.) A version rounds no different from
/// another: Rust never joins a product and a sum into one operation.
#[inline(always)]
pub(crate) fn vectorised<R>(kernel: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(kernel)
}
