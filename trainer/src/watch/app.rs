//! State of the view, and its keys.

use std::path::Path;
use std::time::SystemTime;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::plot::{PlotAxis, PlotScale};
use crate::run_history::{Chart, RunAxis, RunHistory, RunStatus, charts};

/// Smoothing weights, in the order of the key `s`.
pub(super) const SMOOTHING: [f64; 4] = [0.0, 0.6, 0.9, 0.99];

/// State of the view of a run.
#[derive(Clone, Debug)]
pub struct WatchApp {
    pub(super) history: RunHistory,
    pub(super) status: RunStatus,
    pub(super) charts: Vec<Chart>,
    pub(super) axis: RunAxis,
    /// Seconds since the last update of run.json.
    pub(super) age_seconds: Option<f64>,
    /// Index of the large chart.
    pub(super) selected: usize,
    pub(super) scale: PlotScale,
    pub(super) x_axis: PlotAxis,
    /// Index of the weight in `SMOOTHING`.
    pub(super) smoothing: usize,
    /// Error of the last update.
    pub(super) error: Option<String>,
}

/// Effect of a key on the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppControl {
    /// Continue.
    Continue,
    /// End the view.
    Quit,
}

impl WatchApp {
    /// Returns the view of a run, which may start later. It is empty until [`Self::update`].
    pub fn new(path: &Path) -> Self {
        Self {
            history: RunHistory::following(path),
            status: RunStatus::Waiting,
            charts: Vec::new(),
            axis: RunAxis::default(),
            age_seconds: None,
            selected: 0,
            scale: PlotScale::Linear,
            x_axis: PlotAxis::Step,
            smoothing: 1,
            error: None,
        }
    }

    /// Reads what is new. An error is shown, and the next call tries again.
    pub fn update(&mut self, now: SystemTime) {
        let has_changed = match self.history.update() {
            Ok(has_changed) => {
                self.error = None;
                has_changed
            }
            Err(error) => {
                self.error = Some(format!("{error:#}"));
                true
            }
        };
        self.status = self.history.status(now);
        self.age_seconds = self.history.saved.as_ref().and_then(|saved| saved.age_seconds(now));
        if has_changed {
            let title = self.charts.get(self.selected).map(|chart| chart.title.clone());
            self.charts = charts([&self.history.rows]);
            self.axis = self.history.rows.axis();
            let selected = self.charts.iter().position(|chart| Some(&chart.title) == title.as_ref());
            self.selected = selected.unwrap_or(0);
        }
    }

    /// Handles a key.
    pub fn press(&mut self, key: KeyEvent) -> AppControl {
        let n = self.charts.len().max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return AppControl::Quit,
            KeyCode::Char('q') | KeyCode::Esc => return AppControl::Quit,
            KeyCode::Tab | KeyCode::Right | KeyCode::Down => self.selected = (self.selected + 1) % n,
            KeyCode::BackTab | KeyCode::Left | KeyCode::Up => self.selected = (self.selected + n - 1) % n,
            KeyCode::Char('l') => self.scale = self.scale.next(),
            KeyCode::Char('x') => self.x_axis = self.x_axis.next(),
            KeyCode::Char('s') => self.smoothing = (self.smoothing + 1) % SMOOTHING.len(),
            _ => {}
        }
        AppControl::Continue
    }

    pub(super) fn weight(&self) -> f64 {
        SMOOTHING[self.smoothing]
    }
}
