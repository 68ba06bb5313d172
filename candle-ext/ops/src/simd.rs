//! Loops compiled for the SIMD instructions of the running processor.

/// Evaluates an expression, such as a loop, in a version compiled for the processor's widest SIMD instructions.
///
/// All of the loop must be inlined into the expression, so that the compiler can vectorise it. All versions round
/// alike: Rust never fuses a multiplication and an addition.
macro_rules! vectorised {
    ($loop:expr) => {{
        let once = $crate::simd::Once;
        // Without `inline(always)`, the closure may become a function compiled for any processor.
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

/// Token that a closure consumes, which makes it `FnOnce`. An `Fn` is called through a shim, which may not be inlined.
pub(crate) struct Once;

/// Prefetches the cache lines of `n` numbers. The address may be invalid. A no-op on processors other than x86-64.
#[inline(always)]
pub(crate) fn prefetch<T>(from: *const T, n: usize) {
    #[cfg(target_arch = "x86_64")]
    for i in (0..n).step_by(64 / size_of::<T>()) {
        // SAFETY: prefetches do not fault.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(from.wrapping_add(i).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, n);
}
