//! Layout and widgets of the view: head, large chart, cards of all charts, keys.

use candlewick_text::printable::printable;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart as ChartWidget, Dataset, GraphType, LineGauge, Paragraph, Sparkline, Wrap};

use super::app::WatchApp;
use super::plot::{Plot, PlotLine, PlotSettings, PlotStyle};
use super::text::steps;
use crate::metrics::{clock, quantity};
use crate::run_history::{Chart, RunStatus, downsample};

/// Colors of the metrics of a chart.
const COLORS: [Color; 4] = [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green];
/// Size of a card: title, values, sparkline.
const CARD_HEIGHT: u16 = 3;
const CARD_WIDTH: u16 = 26;
/// Fewest rows of the large chart next to cards.
const CHART_HEIGHT: u16 = 8;

/// Draws the view.
pub fn draw(frame: &mut Frame, app: &WatchApp) {
    let area = frame.area();
    let problem = problem(app);
    let problem_height = problem.as_ref().map_or(0, |text| text_height(text, area.width).min(4));
    let cards_height = cards_height(app, area, 4 + problem_height);
    let rows = [3, problem_height].map(Constraint::Length).into_iter();
    let rows = rows.chain([Constraint::Min(0), Constraint::Length(cards_height), Constraint::Length(1)]);
    let [head, problem_area, main, cards, keys] = Layout::vertical(rows).areas(area);
    draw_head(frame, app, head);
    if let Some(text) = problem {
        frame.render_widget(Paragraph::new(text).red().wrap(Wrap { trim: true }), problem_area);
    }
    draw_main(frame, app, main);
    draw_cards(frame, app, cards);
    draw_keys(frame, app, keys);
}

/// Returns the error of the run, or of the last update.
fn problem(app: &WatchApp) -> Option<String> {
    let of_run = match &app.status {
        RunStatus::Failed { .. } | RunStatus::Silent { .. } => {
            Some(format!("{} {}", app.status.word(), app.status.reason()))
        }
        _ => None,
    };
    app.error.clone().or(of_run).map(|text| printable(&text).replace('\n', " "))
}

fn text_height(text: &str, width: u16) -> u16 {
    text.chars().count().div_ceil(usize::from(width.max(1))) as u16
}

fn draw_head(frame: &mut Frame, app: &WatchApp, area: Rect) {
    let [title, gauge, facts] = Layout::vertical([Constraint::Length(1); 3]).areas(area);
    let name = printable(&app.history.name()).into_owned();
    let color = match app.status {
        RunStatus::Finished { .. } => Color::Green,
        RunStatus::Failed { .. } | RunStatus::Silent { .. } => Color::Red,
        RunStatus::Stopped { .. } | RunStatus::Waiting | RunStatus::Unknown => Color::Yellow,
        RunStatus::Starting | RunStatus::Running => Color::Cyan,
    };
    let status = Span::styled(app.status.word(), Style::new().fg(color).add_modifier(Modifier::BOLD));
    frame.render_widget(Line::from(vec![Span::from(name).bold(), Span::from("  "), status]), title);
    frame.render_widget(Line::from(progress(app)).alignment(Alignment::Right), title);
    let total = app.history.total_steps().unwrap_or(0).max(1);
    let ratio = (app.history.steps_done() as f64 / total as f64).clamp(0.0, 1.0);
    let bar = LineGauge::default().ratio(ratio).filled_style(Style::new().fg(color)).label("");
    let bar = bar.filled_symbol("━").unfilled_symbol("─");
    frame.render_widget(bar, gauge);
    frame.render_widget(Line::from(facts_of(app).join("  ")).dim(), facts);
}

/// Returns the steps done and the estimated remaining time.
fn progress(app: &WatchApp) -> String {
    let left = app.history.seconds_left().filter(|seconds| app.status.is_in_progress() && *seconds > 0.0);
    let left = left.map_or_else(String::new, |seconds| format!("  ETA {}", clock(seconds)));
    format!("step {}{left}", steps(&app.history))
}

fn facts_of(app: &WatchApp) -> Vec<String> {
    let saved = app.history.saved.as_ref();
    let number = |pointer: &str| saved.and_then(|saved| saved.count(pointer)).map(|n| quantity(n as f64));
    let device = saved.and_then(|saved| saved.text("/run/device")).map(|device| printable(device).into_owned());
    let ranks = saved.and_then(|saved| saved.count("/run/mesh/world_size")).filter(|ranks| *ranks > 1);
    let tokens = app.axis.tokens.last().filter(|tokens| **tokens > 0.0);
    let seconds = app.axis.seconds.last().filter(|seconds| **seconds > 0.0);
    let age = app.age_seconds.filter(|_| app.status.is_in_progress());
    let reason = match &app.status {
        RunStatus::Finished { reason } | RunStatus::Stopped { reason } => Some(printable(reason).into_owned()),
        RunStatus::Starting | RunStatus::Unknown => Some(app.status.reason()),
        _ => None,
    };
    let all = [
        reason,
        number("/run/parameters").map(|n| format!("{n} parameters")),
        device,
        ranks.map(|ranks| format!("{ranks} ranks")),
        tokens.map(|tokens| format!("{} tokens", quantity(tokens.round()))),
        seconds.map(|seconds| format!("{} of training", clock(*seconds))),
        age.map(|seconds| format!("updated {}s ago", seconds.round())),
    ];
    all.into_iter().flatten().collect()
}

fn draw_main(frame: &mut Frame, app: &WatchApp, area: Rect) {
    let Some(chart) = app.charts.get(app.selected) else {
        frame.render_widget(Paragraph::new(waiting(app)).wrap(Wrap { trim: true }), area);
        return;
    };
    let settings = PlotSettings {
        scale: app.scale,
        x_axis: app.x_axis,
        weight: app.weight(),
        most: 2 * usize::from(area.width.max(10)),
    };
    let block = Block::bordered().title(chart.title.clone().bold()).border_style(Style::new().dim());
    match Plot::of(chart, &app.history.rows, &app.axis, settings) {
        Some(plot) => draw_chart(frame, &plot, app.x_axis.name(), block, area),
        None => {
            let text = "no finite values for this scale; press l for a linear scale";
            frame.render_widget(Paragraph::new(text).block(block).wrap(Wrap { trim: true }), area);
        }
    }
}

/// Returns the text in place of a chart.
fn waiting(app: &WatchApp) -> String {
    let files = &app.history.files;
    match app.status {
        RunStatus::Waiting => format!(
            "Waiting for {} and {}. The view starts when a run writes them.",
            files.run_json.display(),
            files.metrics.display()
        ),
        _ => format!("No records in {} yet.", files.metrics.display()),
    }
}

fn draw_chart(frame: &mut Frame, plot: &Plot, x_title: &'static str, block: Block, area: Rect) {
    let has_legend = plot.lines.iter().any(|line| line.idx > 0);
    let sets = plot.lines.iter().map(|line| dataset(line, has_legend)).collect();
    // Three labels fit above each other only in a chart of at least five rows.
    let y_labels: Vec<String> = match area.height {
        0..9 => [0, 4].map(|idx| plot.y_labels[idx].clone()).to_vec(),
        9..16 => [0, 2, 4].map(|idx| plot.y_labels[idx].clone()).to_vec(),
        _ => plot.y_labels.clone(),
    };
    let axis = |bounds: [f64; 2], labels: Vec<String>| Axis::default().bounds(bounds).labels(labels).dim();
    let widget = ChartWidget::new(sets)
        .block(block)
        .x_axis(axis(plot.x_bounds, plot.x_labels.clone()).title(x_title))
        .y_axis(axis(plot.y_bounds, y_labels))
        .hidden_legend_constraints((Constraint::Percentage(60), Constraint::Percentage(60)));
    frame.render_widget(widget, area);
}

fn dataset(line: &PlotLine, has_legend: bool) -> Dataset<'_> {
    let color = COLORS[line.idx % COLORS.len()];
    let (style, graph, marker) = match line.style {
        PlotStyle::Faint => (Style::new().fg(Color::DarkGray), GraphType::Line, Marker::Braille),
        PlotStyle::Line => (Style::new().fg(color), GraphType::Line, Marker::Braille),
        PlotStyle::Marked => (Style::new().fg(color), GraphType::Scatter, Marker::Dot),
    };
    let set = Dataset::default().data(&line.points).style(style).graph_type(graph).marker(marker);
    if has_legend && line.style != PlotStyle::Faint { set.name(line.label.clone()) } else { set }
}

/// Returns the columns of the cards in a width.
fn card_columns(app: &WatchApp, width: u16) -> usize {
    usize::from((width / CARD_WIDTH).max(1)).min(app.charts.len().max(1))
}

/// Returns the rows for cards; 0 if the large chart needs the space.
fn cards_height(app: &WatchApp, area: Rect, n_other_rows: u16) -> u16 {
    let n_rows = app.charts.len().div_ceil(card_columns(app, area.width)) as u16;
    let space = area.height.saturating_sub(n_other_rows + CHART_HEIGHT);
    n_rows.min(space / CARD_HEIGHT) * CARD_HEIGHT
}

fn draw_cards(frame: &mut Frame, app: &WatchApp, area: Rect) {
    let n_columns = card_columns(app, area.width);
    let n_rows = usize::from(area.height / CARD_HEIGHT);
    // The row of the selected card is visible.
    let first_row = (app.selected / n_columns + 1).saturating_sub(n_rows);
    let rows = Layout::vertical(vec![Constraint::Length(CARD_HEIGHT); n_rows]).split(area);
    for (row_idx, row) in rows.iter().enumerate() {
        let columns =
            Layout::horizontal(vec![Constraint::Ratio(1, n_columns as u32); n_columns]).spacing(2).split(*row);
        for (column_idx, card) in columns.iter().enumerate() {
            let idx = (first_row + row_idx) * n_columns + column_idx;
            if let Some(chart) = app.charts.get(idx) {
                draw_card(frame, app, chart, idx, *card);
            }
        }
    }
}

fn draw_card(frame: &mut Frame, app: &WatchApp, chart: &Chart, idx: usize, area: Rect) {
    let [title, values, line] = Layout::vertical([Constraint::Length(1); 3]).areas(area);
    let is_selected = idx == app.selected;
    let style = if is_selected { Style::new().reversed() } else { Style::new().dim() };
    frame.render_widget(Span::styled(chart.title.clone(), style), title);
    frame.render_widget(Line::from(last_values(app, chart)), values);
    let points = chart.lines.first().map(|line| app.history.rows.series(&line.key)).unwrap_or_default();
    let (buckets, _) = downsample(points, usize::from(area.width).max(1));
    let low = buckets.iter().map(|bucket| bucket.mean).fold(f64::INFINITY, f64::min);
    let high = buckets.iter().map(|bucket| bucket.mean).fold(f64::NEG_INFINITY, f64::max);
    let part = |value: f64| if high > low { (value - low) / (high - low) } else { 0.5 };
    // The lowest value has a bar, too.
    let data: Vec<u64> = buckets.iter().map(|bucket| 1 + (63.0 * part(bucket.mean)).round() as u64).collect();
    frame.render_widget(Sparkline::default().data(data).max(64).style(Style::new().fg(COLORS[0])), line);
}

/// Returns the last value of each metric of a chart.
fn last_values(app: &WatchApp, chart: &Chart) -> Vec<Span<'static>> {
    let mut spans = Vec::new();
    for (idx, line) in chart.lines.iter().enumerate() {
        let Some(point) = app.history.rows.series(&line.key).last() else { continue };
        let label = if idx == 0 { String::new() } else { format!("  {} ", line.label) };
        spans.push(Span::from(label).dim());
        let color = if point.value.is_finite() { COLORS[idx % COLORS.len()] } else { Color::Red };
        spans.push(Span::styled(chart.unit.format(point.value), Style::new().fg(color)));
    }
    spans
}

fn draw_keys(frame: &mut Frame, app: &WatchApp, area: Rect) {
    let keys = [
        "q quit".to_owned(),
        "tab ← → chart".to_owned(),
        format!("l scale: {}", app.scale.name()),
        format!("s smoothing: {}", app.weight()),
        format!("x axis: {}", app.x_axis.name()),
    ];
    frame.render_widget(Line::from(keys.join("   ")).dim(), area);
}
