//! Parts that the HTML pages of the programs share: frame, style, tables of facts and settings, data for scripts.
//!
//! A [`Page`] is one self-contained file, without requests to a network. With the feature `browser`, `browser` opens
//! pages in a headless Chromium, for tests.

#[cfg(feature = "browser")]
pub mod browser;
mod page;

pub use page::{Page, script_json};
