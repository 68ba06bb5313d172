//! Parser of kernel declarations: names, threads per block and parameter classes.

use super::class::Class;

/// Declaration of a kernel in its source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) max_threads: usize,
    pub(crate) parameters: Vec<Class>,
}

/// Lists the kernels of a preprocessed source, sorted by name. Each starts as the macro `KERNEL` of common.cuh expands.
pub(crate) fn kernels(source: &str) -> Result<Vec<Declared>, String> {
    const BEGINNING: &str = "__global__ void __launch_bounds__(";
    let n_kernels = source.matches("__global__").count();
    let mut all = source.split(BEGINNING).skip(1).map(kernel).collect::<Result<Vec<_>, _>>()?;
    if all.len() != n_kernels {
        return Err(format!(
            "{} of {n_kernels} kernels have no launch bounds: begin each with KERNEL",
            n_kernels - all.len()
        ));
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Parses `256, 2) name(int a, float b) {...`, the text after the start of a kernel.
fn kernel(rest: &str) -> Result<Declared, String> {
    let unfinished =
        || format!("a kernel without a name and parameters: {}", rest.chars().take(80).collect::<String>());
    let (bounds, rest) = closing(rest).ok_or_else(unfinished)?;
    let (name, rest) = rest.split_once('(').ok_or_else(unfinished)?;
    let (parameters, _) = closing(rest).ok_or_else(unfinished)?;
    let name = name.trim();
    let threads = bounds.split(',').next().unwrap_or_default().trim();
    let max_threads =
        threads.parse().map_err(|_| format!("{name}: its threads are `{threads}`; KERNEL takes a plain number"))?;
    let parameters = parameters.split(',').map(|declared| class(name, declared)).collect::<Result<_, _>>()?;
    Ok(Declared { name: name.to_owned(), max_threads, parameters })
}

/// Splits at the parenthesis that closes one opened before the text.
fn closing(text: &str) -> Option<(&str, &str)> {
    let mut depth = 1;
    let end = text.find(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    })?;
    Some((&text[..end], &text[end + 1..]))
}

/// Returns the class of a parameter such as `const float* x`.
fn class(kernel: &str, declared: &str) -> Result<Class, String> {
    if declared.contains('*') {
        return Ok(Class::Pointer);
    }
    let mut words: Vec<&str> = declared.split_whitespace().filter(|word| *word != "const").collect();
    words.pop();
    match words.join(" ").as_str() {
        "int" | "unsigned" | "unsigned int" | "uint" => Ok(Class::Int32),
        "long long" | "unsigned long long" => Ok(Class::Int64),
        "float" => Ok(Class::Float32),
        "double" => Ok(Class::Float64),
        _ => Err(format!(
            "{kernel}: the parameter `{}` has no class; take a pointer, int, unsigned, long long, float or double",
            declared.trim()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_error(source: &str, want: &str) {
        let error = kernels(source).expect_err("the source is wrong");
        assert!(error.contains(want), "{error}");
    }

    #[test]
    fn kernels_are_read_with_their_threads_and_the_classes_of_their_parameters() {
        let source = r#"
            template <int W> int other(int a);
            extern "C" __global__ void __launch_bounds__(128, mma::BLOCKS<(64)>)
                b(const __nv_bfloat16 *x, long long n, unsigned v, const float scale) { run(x); }
            extern "C" __global__ void __launch_bounds__(1024) a(unsigned long long key, double d, int i) {}"#;
        use Class::{Float32, Float64, Int32, Int64, Pointer};
        let want = [("a", 1024, vec![Int64, Float64, Int32]), ("b", 128, vec![Pointer, Int64, Int32, Float32])];
        let want = want.map(|(name, max_threads, parameters)| Declared { name: name.into(), max_threads, parameters });
        assert_eq!(kernels(source), Ok(want.into()));
    }

    #[test]
    fn a_kernel_that_does_not_say_what_it_takes_is_an_error() {
        check_error(r#"extern "C" __global__ void a(int i) {}"#, "1 of 1 kernels have no launch bounds");
        check_error("__global__ void __launch_bounds__(THREADS) a(int i) {}", "its threads are `THREADS`");
        check_error("__global__ void __launch_bounds__(32) a(short i) {}", "a: the parameter `short i` has no class");
        check_error("__global__ void __launch_bounds__(32) a(int i", "a kernel without a name and parameters");
    }
}
