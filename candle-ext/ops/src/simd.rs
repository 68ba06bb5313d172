//! Loops compiled for the vectors of the processor at hand.

/// Evaluates an expression, a loop say, in a version compiled for the widest vectors that the processor has.
///
/// The compiler vectorises what it sees: all of the loop must be in the expression or inlined into it. A version rounds no
/// different from another: Rust never joins a product and a sum into one operation.
macro_rules! vectorised {
    ($loop:expr) => {{
        let once = $crate::simd::Once;
        // Not marked, the closure may stay a function of its own, compiled for any processor.
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let _once = once;
                $loop
            },
        )
    }};
}
pub(crate) use vectorised;

/// What a closure consumes to be one that is called once. One that could be called again is called through a shim, which may
/// stay a function of its own, too.
pub(crate) struct Once;

/// Lets the cache lines of `n` numbers come that are read soon. They need not be there. Does nothing where we know no way.
#[inline(always)]
pub(crate) fn prefetch<T>(from: *const T, n: usize) {
    #[cfg(target_arch = "x86_64")]
    for i in (0..n).step_by(64 / size_of::<T>()) {
        // SAFETY: prefetching touches nothing.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(from.wrapping_add(i).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, n);
}
