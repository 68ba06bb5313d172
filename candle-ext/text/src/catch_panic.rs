//! Panics of other crates on broken files, as errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of another crate and returns what it says if it panics, without the message on stderr.
pub(crate) fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    hush_once();
    let before = IS_QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_QUIET.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
    })
}

/// Keeps the panic hook from printing what [`catch_panic`] returns.
fn hush_once() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                print(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_message() {
        assert_eq!(catch_panic(|| 3), Ok(3));
        assert_eq!(catch_panic(|| panic!("no {}", "entry")), Err::<(), _>("no entry".to_owned()));
        assert!(!IS_QUIET.get());
    }
}
