//! Operators of Python that minijinja evaluates differently: `~` joins the `str` of its operands, `%` formats texts,
//! and the results of `+` and `*` have a maximum length.
//!
//! minijinja has no hook for operators. The source is parsed, and each of these operators becomes a filter before the
//! template is compiled. Line numbers stay the same, for errors.

use std::sync::LazyLock;

use minijinja::machinery::ast::{BinOp, BinOpKind, Call, CallArg, Expr, Macro, Stmt, UnaryOpKind};
use minijinja::machinery::parse;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Expression, State, Value, context};

use super::{invalid, percent};
use crate::template::limits::{check_items, check_size};

/// Registers the filters that [`rewritten`] inserts.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("__candlewick_remainder", remainder);
    environment.add_filter("__candlewick_multiply", multiply);
    environment.add_filter("__candlewick_add", add);
}

/// Implements `left % right`, which formats if `left` is a text.
fn remainder(state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    let Some(format) = left.as_str() else { return arithmetic(&REMAINDER, left, right) };
    let arguments = match right.is_tuple() {
        true => right.try_iter()?.collect(),
        false => vec![right.clone()],
    };
    percent::format(state, format, &arguments).map(Value::from)
}

/// Implements `left + right` within the limits on texts and lists. The engine joins lists without a copy, so doubling
/// one takes no time.
fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => {
            check_size(left.len().checked_add(right.len()))?;
            Ok(Value::from([left, right].concat()))
        }
        _ => {
            check_items(n_items(left).checked_add(n_items(right)))?;
            arithmetic(&SUM, left, right)
        }
    }
}

/// Implements `left * right` within the limits on texts and lists.
fn multiply(left: &Value, right: &Value) -> Result<Value, Error> {
    for (repeated, count) in [(left, right), (right, left)] {
        let (false, Ok(count)) = (repeated.is_number(), i64::try_from(count.clone())) else { continue };
        // A negative count gives an empty result, as in Python.
        let Ok(n_times) = usize::try_from(count) else { return arithmetic(&PRODUCT, repeated, &Value::from(0)) };
        check_size(repeated.as_str().map_or(0, str::len).checked_mul(n_times))?;
        check_items(n_items(repeated).checked_mul(n_times))?;
    }
    arithmetic(&PRODUCT, left, right)
}

/// Returns the length of a list or tuple, and 0 for other values.
fn n_items(value: &Value) -> usize {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.len().unwrap_or(0),
        _ => 0,
    }
}

/// Operator of the engine, compiled once.
type Operator = LazyLock<Expression<'static, 'static>>;

static SUM: Operator = LazyLock::new(|| operator("a + b"));
static PRODUCT: Operator = LazyLock::new(|| operator("a * b"));
static REMAINDER: Operator = LazyLock::new(|| operator("a % b"));

fn operator(expression: &'static str) -> Expression<'static, 'static> {
    static ENGINE: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    ENGINE.compile_expression(expression).expect("the expression is a constant")
}

/// Evaluates an operator of the engine. Its error has no line, so that the template's line is added to it.
fn arithmetic(operator: &Operator, a: &Value, b: &Value) -> Result<Value, Error> {
    let without_line = |error: Error| match error.detail() {
        Some(detail) => Error::new(error.kind(), detail.to_owned()),
        None => Error::from(error.kind()),
    };
    operator.eval(context! { a => a, b => b }).map_err(without_line)
}

/// Replaces the operators `~`, `%`, `+` and `*` of a template by filters. A source with a syntax error is unchanged.
///
/// # Errors
/// If a macro reads `varargs` or `kwargs`.
pub(in crate::template) fn rewritten(environment: &Environment<'_>, source: String) -> Result<String, Error> {
    let edits = match parse(&source, "", environment.syntax().clone()) {
        Ok(template) => {
            check_macros(&template)?;
            edits(&source, &template)
        }
        Err(_) => return Ok(source),
    };
    if edits.len() > MAX_EDITS {
        return Err(invalid("the template has too many operators"));
    }
    let (mut out, mut from) = (String::with_capacity(source.len() + 16 * edits.len()), 0);
    for SourceEdit { at, n_removed, text } in edits {
        out.push_str(&source[from..at]);
        out.push_str(text);
        from = at + n_removed;
    }
    Ok(out + &source[from..])
}

/// Rejects the implicit variables of macros, which would be undefined.
fn check_macros(template: &Stmt) -> Result<(), Error> {
    let mut found = None;
    walk(template, &mut |node| {
        if let TemplateNode::Macro(declaration) = node {
            found = found.or(implicit_variable(declaration));
        }
    });
    match found {
        None => Ok(()),
        Some(name) => {
            Err(invalid(format!("`{name}` of macros is not supported; give the macro a parameter for each argument")))
        }
    }
}

/// Returns the implicit variable that a macro reads. A parameter of that name is an ordinary variable.
fn implicit_variable(declaration: &Macro) -> Option<&'static str> {
    let named = |name| declaration.args.iter().any(|argument| matches!(argument, Expr::Var(it) if it.id == name));
    let names = ["varargs", "kwargs"].map(|name| (!named(name)).then_some(name));
    let mut found = None;
    for statement in &declaration.body {
        walk(statement, &mut |node| {
            if let TemplateNode::Expression(Expr::Var(variable)) = node {
                found = found.or(names.into_iter().flatten().find(|name| *name == variable.id));
            }
        });
    }
    found
}

/// Maximum number of edits. Finding the start of an operand takes a step for each operator before it.
const MAX_EDITS: usize = 20_000;

/// Replacement of `n_removed` bytes at the offset `at`.
struct SourceEdit {
    at: usize,
    n_removed: usize,
    text: &'static str,
}

/// Returns the edits of a template in the order of their offsets. At one offset, inner operators come first.
fn edits(source: &str, template: &Stmt) -> Vec<SourceEdit> {
    let mut edits = Vec::new();
    walk(template, &mut |node| {
        if let TemplateNode::Expression(Expr::BinOp(operation)) = node
            && edits.len() <= MAX_EDITS
        {
            operator_edits(source, operation, &mut edits);
        }
    });
    edits.sort_by_key(|edit| edit.at);
    edits
}

fn operator_edits(source: &str, operation: &BinOp, edits: &mut Vec<SourceEdit>) {
    let mut edit = |at, n_removed, text| edits.push(SourceEdit { at, n_removed, text });
    let BinOp { op, left, right } = operation;
    if matches!(op, BinOpKind::Concat) {
        for operand in [left, right].into_iter().filter(|operand| !is_text(operand)) {
            edit(start(source, operand), 0, "(");
            edit(end(operand), 0, ")|string");
        }
    }
    let Some((operator, filter, filter_after_bracket)) = filter_of(operation) else { return };
    // Only brackets and white space stand between an operand and its operator.
    let Some(found) = source[end(left)..start(source, right)].find(operator) else { return };
    // A left operand that becomes a filter needs no brackets. Those of a long sum would nest too deeply for the parser.
    let is_filter = matches!(left, Expr::BinOp(left) if filter_of(left).is_some());
    if !is_filter {
        edit(start(source, left), 0, "(");
    }
    edit(end(left) + found, 1, if is_filter { filter } else { filter_after_bracket });
    edit(end(right), 0, ")");
}

/// Returns the operator and its replacement: after a filter, and after an operand in brackets.
fn filter_of(BinOp { op, left, right }: &BinOp) -> Option<(char, &'static str, &'static str)> {
    match op {
        BinOpKind::Rem => Some(('%', "|__candlewick_remainder(", ")|__candlewick_remainder(")),
        BinOpKind::Mul if !(is_number(left) && is_number(right)) => {
            Some(('*', "|__candlewick_multiply(", ")|__candlewick_multiply("))
        }
        BinOpKind::Add if !(is_number(left) || is_number(right)) => {
            Some(('+', "|__candlewick_add(", ")|__candlewick_add("))
        }
        _ => None,
    }
}

fn is_text(operand: &Expr) -> bool {
    match operand {
        Expr::Const(constant) => constant.value.as_str().is_some(),
        Expr::BinOp(operation) => matches!(operation.op, BinOpKind::Concat),
        _ => false,
    }
}

fn is_number(operand: &Expr) -> bool {
    matches!(operand, Expr::Const(constant) if constant.value.is_number())
}

/// Returns the offset of the first token of an expression, after its own brackets.
fn start(source: &str, expression: &Expr) -> usize {
    let first = match expression {
        Expr::Slice(it) => Some(&it.expr),
        Expr::BinOp(it) => Some(&it.left),
        Expr::Compare(it) => Some(&it.expr),
        Expr::IfExpr(it) => Some(&it.true_expr),
        Expr::Test(it) => Some(&it.expr),
        Expr::GetAttr(it) => Some(&it.expr),
        Expr::GetItem(it) => Some(&it.expr),
        Expr::Call(it) => Some(&it.expr),
        Expr::Filter(it) => it.expr.as_ref(),
        // `a not in b` and `a is not b` are negations without a token in front.
        Expr::UnaryOp(it) if matches!(it.op, UnaryOpKind::Not) => {
            let at = it.span().start_offset as usize;
            (!source[at..].starts_with("not")).then_some(&it.expr)
        }
        _ => None,
    };
    first.map_or(expression.span().start_offset as usize, |first| start(source, first))
}

fn end(expression: &Expr) -> usize {
    expression.span().end_offset as usize
}

/// Part of a template that [`walk`] visits.
enum TemplateNode<'n, 's> {
    Expression(&'n Expr<'s>),
    Macro(&'n Macro<'s>),
}

type Visitor<'v> = &'v mut dyn FnMut(TemplateNode);

/// Calls `visit` with each expression and macro of a statement, operands before their operator.
fn walk(statement: &Stmt, visit: Visitor) {
    let mut bodies: Vec<&[Stmt]> = Vec::new();
    match statement {
        Stmt::Template(it) => bodies.push(&it.children),
        Stmt::EmitExpr(it) => walk_expression(&it.expr, visit),
        Stmt::ForLoop(it) => {
            walk_expression(&it.iter, visit);
            it.filter_expr.iter().for_each(|expression| walk_expression(expression, visit));
            bodies.extend([&it.body[..], &it.else_body]);
        }
        Stmt::IfCond(it) => {
            walk_expression(&it.expr, visit);
            bodies.extend([&it.true_body[..], &it.false_body]);
        }
        Stmt::WithBlock(it) => {
            it.assignments.iter().for_each(|(_, value)| walk_expression(value, visit));
            bodies.push(&it.body);
        }
        Stmt::Set(it) => walk_expression(&it.expr, visit),
        Stmt::SetBlock(it) => {
            it.filter.iter().for_each(|filter| walk_expression(filter, visit));
            bodies.push(&it.body);
        }
        Stmt::AutoEscape(it) => bodies.push(&it.body),
        Stmt::FilterBlock(it) => {
            walk_expression(&it.filter, visit);
            bodies.push(&it.body);
        }
        Stmt::Block(it) => bodies.push(&it.body),
        Stmt::Macro(it) => walk_macro(it, visit),
        Stmt::CallBlock(it) => {
            walk_call(&it.call, visit);
            walk_macro(&it.macro_decl, visit);
        }
        Stmt::Do(it) => walk_call(&it.call, visit),
        _ => {}
    }
    bodies.into_iter().flatten().for_each(|statement| walk(statement, visit));
}

fn walk_macro(declaration: &Macro, visit: Visitor) {
    visit(TemplateNode::Macro(declaration));
    declaration.defaults.iter().for_each(|default| walk_expression(default, visit));
    declaration.body.iter().for_each(|statement| walk(statement, visit));
}

fn walk_call(call: &Call, visit: Visitor) {
    walk_expression(&call.expr, visit);
    walk_arguments(&call.args, visit);
}

fn walk_arguments(arguments: &[CallArg], visit: Visitor) {
    for argument in arguments {
        let (CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value)) =
            argument;
        walk_expression(value, visit);
    }
}

fn walk_expression(expression: &Expr, visit: Visitor) {
    let mut operands: Vec<&Expr> = Vec::new();
    match expression {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(it) => {
            operands.push(&it.expr);
            operands.extend([&it.start, &it.stop, &it.step].into_iter().flatten());
        }
        Expr::UnaryOp(it) => operands.push(&it.expr),
        Expr::BinOp(it) => operands.extend([&it.left, &it.right]),
        Expr::Compare(it) => {
            operands.push(&it.expr);
            operands.extend(it.ops.iter().map(|operation| &operation.expr));
        }
        Expr::IfExpr(it) => {
            operands.extend([&it.true_expr, &it.test_expr]);
            operands.extend(&it.false_expr);
        }
        Expr::Filter(it) => {
            it.expr.iter().for_each(|operand| walk_expression(operand, visit));
            walk_arguments(&it.args, visit);
        }
        Expr::Test(it) => {
            walk_expression(&it.expr, visit);
            walk_arguments(&it.args, visit);
        }
        Expr::GetAttr(it) => operands.push(&it.expr),
        Expr::GetItem(it) => operands.extend([&it.expr, &it.subscript_expr]),
        Expr::Call(it) => walk_call(it, visit),
        Expr::List(it) => operands.extend(&it.items),
        Expr::Tuple(it) => operands.extend(&it.items),
        Expr::Map(it) => operands.extend(it.keys.iter().chain(&it.values)),
    }
    operands.into_iter().for_each(|operand| walk_expression(operand, visit));
    visit(TemplateNode::Expression(expression));
}
