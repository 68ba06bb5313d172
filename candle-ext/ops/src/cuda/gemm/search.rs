//! Search for an algorithm of a GEMM, from the strictest limits to the loosest, then cublasGemmEx.
//!
//! The trait [`Library`] abstracts the library's calls, so that the search order is tested without a GPU.

use std::fmt;

use super::key::GemmKey;

/// Algorithms tried or timed within the same limits.
const N_CANDIDATES: usize = 8;

/// Speed-up that a tuned algorithm needs: at most this fraction of the first one's time. Less is noise.
const FASTER: f32 = 0.98;

/// Opaque cuBLASLt algorithm, which the same version of the library can restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm(pub(super) [u64; 8]);

/// An error of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GemmError {
    /// The library does not support the call; another algorithm may. Nothing was computed.
    Refused(String),
    /// The device, its memory or the library failed; another algorithm would fail as well.
    Fatal(String),
}

impl GemmError {
    /// Classifies a cuBLAS status by its name: an unsupported call or a failure.
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

/// Reduction schemes of split-K partial sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reductions {
    /// Sums in f32, rounded once.
    InF32,
    /// None: k is not split, so that a row's bits do not depend on the number of rows.
    Unsplit,
    /// Any scheme, including sums in the output's dtype.
    Any,
}

/// Limits on the algorithms that a heuristic may return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) reductions: Reductions,
    /// Most alignment in bytes that an algorithm may assume for a, b, c and the addend.
    pub(super) alignments: [u32; 4],
}

/// Calls of NVIDIA's libraries for one GEMM.
pub(super) trait Library {
    /// Returns at most n algorithms, the one expected to be fastest first.
    fn candidates(&mut self, limits: &Limits, n: usize) -> Result<Vec<Algorithm>, GemmError>;
    /// Fails unless a restored algorithm supports this GEMM.
    fn check(&mut self, algorithm: &Algorithm) -> Result<(), GemmError>;
    /// Computes the GEMM by cublasLtMatmul.
    fn multiply(&mut self, algorithm: &Algorithm) -> Result<(), GemmError>;
    /// Computes the GEMM by cublasGemmEx.
    fn multiply_by_gemm_ex(&mut self) -> Result<(), GemmError>;
    /// Times the GEMM into a scratch output, in microseconds.
    fn microseconds(&mut self, algorithm: &Algorithm) -> Result<f32, GemmError>;
}

/// Route by which a GEMM was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Lt(Algorithm),
    GemmEx,
}

/// Route, with a description if it is a fallback.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SelectedRoute {
    pub(super) route: Route,
    pub(super) fallback: Option<String>,
}

/// Fastest algorithm, and the heuristic's first one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Timed {
    pub(super) algorithm: Algorithm,
    pub(super) microseconds: f32,
    pub(super) first_microseconds: f32,
}

impl fmt::Display for GemmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(why) | Self::Fatal(why)) = self;
        f.write_str(why)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, plus] = self.alignments;
        let reductions = match self.reductions {
            Reductions::InF32 => "partial sums in f32",
            Reductions::Unsplit => "no partial sums",
            Reductions::Any => "partial sums in any dtype",
        };
        write!(f, "{reductions}, alignments {a},{b},{c},{plus}")
    }
}

/// Returns the limits to search within, in order: strict, any reduction, lower alignments.
pub(super) fn limits(key: &GemmKey) -> Vec<Limits> {
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

/// Computes a GEMM by the first algorithm that the library supports. The order is `preferred`, the heuristic's
/// candidates, cublasGemmEx.
pub(super) fn compute(
    library: &mut impl Library,
    key: &GemmKey,
    preferred: Option<Algorithm>,
) -> Result<SelectedRoute, String> {
    let mut refusals = Refusals::default();
    if let Some(algorithm) = preferred
        && refusals.accepts("the tuned algorithm", library.multiply(&algorithm))?
    {
        return Ok(SelectedRoute { route: Route::Lt(algorithm), fallback: None });
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
                return Ok(SelectedRoute { route: Route::Lt(*algorithm), fallback });
            }
        }
    }
    if refusals.accepts("cublasGemmEx", library.multiply_by_gemm_ex())? {
        return Ok(SelectedRoute { route: Route::GemmEx, fallback: refusals.fallback("cublasGemmEx") });
    }
    Err(format!("no algorithm computes it: {refusals}"))
}

/// Times the heuristic's candidates within the strictest limits. `None` if none runs.
pub(super) fn fastest(library: &mut impl Library, key: &GemmKey) -> Result<Option<Timed>, String> {
    let candidates = match library.candidates(&limits(key)[0], N_CANDIDATES) {
        Ok(candidates) => candidates,
        Err(GemmError::Refused(_)) => return Ok(None),
        Err(GemmError::Fatal(why)) => return Err(why),
    };
    let mut timed: Vec<(Algorithm, f32)> = Vec::new();
    for algorithm in candidates {
        match library.microseconds(&algorithm) {
            Ok(microseconds) => timed.push((algorithm, microseconds)),
            Err(GemmError::Refused(_)) => {}
            Err(GemmError::Fatal(why)) => return Err(why),
        }
    }
    let Some(&(first, first_microseconds)) = timed.first() else { return Ok(None) };
    let best = timed.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b));
    let (algorithm, microseconds) =
        best.filter(|(_, best)| *best <= FASTER * first_microseconds).unwrap_or((first, first_microseconds));
    Ok(Some(Timed { algorithm, microseconds, first_microseconds }))
}

/// Refusals so far, in order.
#[derive(Default)]
struct Refusals(Vec<String>);

impl Refusals {
    /// Returns true if an attempt succeeded. Records a refusal; passes on any other failure.
    fn accepts(&mut self, attempt: impl fmt::Display, result: Result<(), GemmError>) -> Result<bool, String> {
        match result {
            Ok(()) => return Ok(true),
            Err(GemmError::Refused(why)) => self.0.push(format!("{attempt}: {why}")),
            Err(GemmError::Fatal(why)) => return Err(format!("{attempt}: {why}")),
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
