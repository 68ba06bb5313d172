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
