//! Search for an algorithm that computes a GEMM: from the strictest limits to the loosest, then cublasGemmEx.
//!
//! The library's calls are behind [`Library`], so that the order of the attempts is tested without a GPU.

use std::fmt;

use super::key::Key;

/// Algorithms that are tried, or timed, within the same limits.
const N_CANDIDATES: usize = 8;

/// A timed algorithm replaces the first one if it takes at most this fraction of its time: less is noise.
const FASTER: f32 = 0.98;

/// An algorithm as cuBLASLt describes it, to be restored by the same version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm(pub(super) [u64; 8]);

/// An error of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The library has no such product; another algorithm may have it. Nothing was computed.
    Refused(String),
    /// Another algorithm would fail, too: the device, its memory or the library.
    Fatal(String),
}

impl Failure {
    /// Distinguishes a matmul that the library does not have from a library that fails, by the name that a cuBLAS status prints.
    pub(super) fn of_status(status: impl fmt::Debug) -> Self {
        let why = format!("{status:?}");
        match why.as_str() {
            "CUBLAS_STATUS_NOT_SUPPORTED" | "CUBLAS_STATUS_INVALID_VALUE" | "CUBLAS_STATUS_ARCH_MISMATCH" => {
                Self::Refused(why)
            }
            _ => Self::Fatal(why),
        }
    }
}

/// Ways to add up the sums of parts of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reductions {
    /// In f32, rounded once.
    InF32,
    /// Also in the output's dtype.
    Any,
}

/// Limits on the algorithms that a heuristic may return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) reductions: Reductions,
    /// Bytes that an algorithm may expect the addresses of a, b, c and the addend to be multiples of.
    pub(super) alignments: [u32; 4],
}

/// Calls of NVIDIA's libraries for one GEMM.
pub(super) trait Library {
    /// Returns at most n algorithms, the one that should be fastest first.
    fn candidates(&mut self, limits: &Limits, n: usize) -> Result<Vec<Algorithm>, Failure>;
    /// Fails unless a restored algorithm computes this GEMM.
    fn check(&mut self, algorithm: &Algorithm) -> Result<(), Failure>;
    /// Computes the GEMM by cublasLtMatmul.
    fn multiply(&mut self, algorithm: &Algorithm) -> Result<(), Failure>;
    /// Computes the GEMM by cublasGemmEx.
    fn multiply_by_gemm_ex(&mut self) -> Result<(), Failure>;
    /// Measures the GEMM into an output of no use.
    fn microseconds(&mut self, algorithm: &Algorithm) -> Result<f32, Failure>;
}

/// A way that has computed a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Lt(Algorithm),
    GemmEx,
}

/// A route, and the fallback that it is, in words, unless it was the first choice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) route: Route,
    pub(super) fallback: Option<String>,
}

/// The fastest algorithm, and the one that the heuristic put first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Timed {
    pub(super) algorithm: Algorithm,
    pub(super) microseconds: f32,
    pub(super) first_microseconds: f32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(why) | Self::Fatal(why)) = self;
        f.write_str(why)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, plus] = self.alignments;
        let reductions = match self.reductions {
            Reductions::InF32 => "sums of parts in f32",
            Reductions::Any => "sums of parts in any dtype",
        };
        write!(f, "{reductions}, alignments {a},{b},{c},{plus}")
    }
}

/// Returns the limits to search within, in their order: those that are wanted, any reduction, then lower alignments.
pub(super) fn limits(key: &Key) -> Vec<Limits> {
    let any = Limits { reductions: Reductions::Any, alignments: key.alignments };
    let mut all = vec![Limits { reductions: Reductions::InF32, ..any }, any];
    for alignment in [16, 8, 4, 2] {
        let mut alignments = key.alignments;
        for (bytes, element) in alignments.iter_mut().zip(key.element_sizes()) {
            *bytes = (*bytes).min(alignment.max(element));
        }
        let lower = Limits { alignments, ..any };
        if all.last() != Some(&lower) {
            all.push(lower);
        }
    }
    all
}

/// Computes a GEMM by the first algorithm that the library does not refuse: `preferred`, those of its heuristics, then
/// cublasGemmEx.
pub(super) fn compute(library: &mut impl Library, key: &Key, preferred: Option<Algorithm>) -> Result<Found, String> {
    let mut refusals = Refusals::default();
    if let Some(algorithm) = preferred
        && refusals.accepts("the tuned algorithm", library.multiply(&algorithm))?
    {
        return Ok(Found { route: Route::Lt(algorithm), fallback: None });
    }
    for limits in limits(key) {
        let candidates = match library.candidates(&limits, N_CANDIDATES) {
            Ok(candidates) => candidates,
            refused => {
                refusals.accepts(limits, refused.map(|_| ()))?;
                continue;
            }
        };
        for (i, algorithm) in candidates.iter().enumerate() {
            if refusals.accepts(format_args!("algorithm {i} of {limits}"), library.multiply(algorithm))? {
                let fallback = refusals.fallback(format_args!("cuBLASLt with {limits}"));
                return Ok(Found { route: Route::Lt(*algorithm), fallback });
            }
        }
    }
    if refusals.accepts("cublasGemmEx", library.multiply_by_gemm_ex())? {
        return Ok(Found { route: Route::GemmEx, fallback: refusals.fallback("cublasGemmEx") });
    }
    Err(format!("no algorithm computes it: {refusals}"))
}

/// Times the heuristic's algorithms within the strictest limits. `None` if it has none that runs.
pub(super) fn fastest(library: &mut impl Library, key: &Key) -> Result<Option<Timed>, String> {
    let candidates = match library.candidates(&limits(key)[0], N_CANDIDATES) {
        Ok(candidates) => candidates,
        Err(Failure::Refused(_)) => return Ok(None),
        Err(Failure::Fatal(why)) => return Err(why),
    };
    let mut timed: Vec<(Algorithm, f32)> = Vec::new();
    for algorithm in candidates {
        match library.microseconds(&algorithm) {
            Ok(microseconds) => timed.push((algorithm, microseconds)),
            Err(Failure::Refused(_)) => {}
            Err(Failure::Fatal(why)) => return Err(why),
        }
    }
    let Some(&(first, first_microseconds)) = timed.first() else { return Ok(None) };
    let best = timed.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b));
    let (algorithm, microseconds) =
        best.filter(|(_, best)| *best <= FASTER * first_microseconds).unwrap_or((first, first_microseconds));
    Ok(Some(Timed { algorithm, microseconds, first_microseconds }))
}

/// Refusals so far, in their order.
#[derive(Default)]
struct Refusals(Vec<String>);

impl Refusals {
    /// Returns whether an attempt succeeded; keeps a refusal, and passes any other failure on.
    fn accepts(&mut self, attempt: impl fmt::Display, result: Result<(), Failure>) -> Result<bool, String> {
        match result {
            Ok(()) => return Ok(true),
            Err(Failure::Refused(why)) => self.0.push(format!("{attempt}: {why}")),
            Err(Failure::Fatal(why)) => return Err(format!("{attempt}: {why}")),
        }
        Ok(false)
    }

    fn fallback(&self, route: impl fmt::Display) -> Option<String> {
        (!self.0.is_empty()).then(|| format!("{route}, after {self}"))
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

#[cfg(test)]
pub(super) mod tests;
