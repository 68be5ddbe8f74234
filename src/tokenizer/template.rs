//! Chat templates: Jinja2 with the settings, filters and functions that HF `transformers` gives
//! them, so that a model's own template renders to the same text.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, State, context};
use serde_json::Map;

use super::json;
use crate::{Error, Result};

const NAME: &str = "chat";

/// A template cannot make `tojson` indent by more spaces than this.
const MAX_INDENT: usize = 16;

/// Templates for `--chat-template NAME`.
const BUILTIN: &[(&str, &str)] = &[
    ("chatml", include_str!("templates/chatml.jinja")),
    ("llama2", include_str!("templates/llama2.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("mistral", include_str!("templates/mistral.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// What a template sees besides the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateArgs {
    /// Whether the text ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// The text of BOS; empty without one.
    pub bos_token: String,
    /// The text of EOS; empty without one.
    pub eos_token: String,
    /// Further variables: `tools`, `enable_thinking`, `reasoning_effort`.
    pub extra: Map<String, serde_json::Value>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Compiles `source`. A fault is an [`Error::Template`] with its line.
    pub fn parse(source: &str) -> Result<Self> {
        let mut env = environment()?;
        env.add_template_owned(NAME, without_generation_tags(source)).map_err(template_error)?;
        Ok(ChatTemplate { env, source: source.to_owned() })
    }

    /// A template by its llama.cpp name.
    pub fn builtin(name: &str) -> Result<Self> {
        let Some((_, source)) = BUILTIN.iter().find(|(known, _)| *known == name) else {
            let known: Vec<_> = BUILTIN.iter().map(|(name, _)| *name).collect();
            let problem = format!("no template `{name}`; there are {}", known.join(", "));
            return Err(Error::usage("--chat-template", problem));
        };
        Self::parse(source)
    }

    /// The value of `--chat-template`: a name, or a template written out.
    pub fn from_flag(value: &str) -> Result<Self> {
        let is_jinja = value.contains("{%") || value.contains("{{");
        if is_jinja { Self::parse(value) } else { Self::builtin(value) }
    }

    /// The text as given to [`Self::parse`].
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation. As in HF, `tools` and `documents` are none unless given.
    pub fn render(&self, messages: &[Message], args: &TemplateArgs) -> Result<String> {
        let message = |m: &Message| {
            context! { role => m.role.as_str(), content => m.content.as_str() }
        };
        let none = ["tools", "documents"].map(|name| (name, Value::from(())));
        let extra = args.extra.iter().map(|(k, v)| (k.as_str(), json::to_template(v)));
        let context = context! {
            messages => messages.iter().map(message).collect::<Value>(),
            add_generation_prompt => args.add_generation_prompt,
            bos_token => args.bos_token.as_str(),
            eos_token => args.eos_token.as_str(),
            ..Value::from_pairs(none.into_iter().chain(extra))
        };
        let template = self.env.get_template(NAME).map_err(template_error)?;
        template.render(context).map_err(template_error)
    }
}

fn environment() -> Result<Environment<'static>> {
    let mut env = Environment::new();
    let syntax = minijinja::syntax::SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(template_error)?;
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", to_json);
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    Ok(env)
}

/// `{% generation %}` marks the assistant's text for training and changes nothing else; `{% if true
/// %}` does neither.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let body = &tag[..tag.find("%}").unwrap_or(tag.len())];
        let word = body.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let instead = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&body.replacen(word, instead, 1));
        rest = &tag[body.len()..];
    }
    out + rest
}

fn template_error(error: minijinja::Error) -> Error {
    let detail = error.detail().unwrap_or_default();
    let problem = match (error.kind(), detail) {
        (kind, "") => kind.to_string(),
        // raise_exception: the template's own words.
        (ErrorKind::InvalidOperation, detail) => detail.to_owned(),
        (kind, detail) => format!("{kind}: {detail}"),
    };
    Error::Template { line: error.line().unwrap_or(1), problem }
}

/// In Python none is not iterable, which templates rely on in `tools is iterable and tools | length`.
fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// `json.dumps` as HF calls it.
fn to_json(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, minijinja::Error> {
    let ensure_ascii = match args.first() {
        Some(given) => given.is_true(),
        None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = kwargs.get::<Option<usize>>("indent")?.map(|n| n.min(MAX_INDENT));
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let style = json::Style { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    json::dumps(value, &style)
}

/// Python's methods: those of `minijinja-contrib`, and a few that it lacks.
fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, minijinja::Error> {
    if let (Some(text), [arg]) = (value.as_str(), args)
        && let Some(arg) = arg.as_str()
        && let Some(result) = string_method(text, name, arg)
    {
        return Ok(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn string_method(text: &str, name: &str, arg: &str) -> Option<Value> {
    let three = |a: &str, b: &str, c: &str| [a, b, c].into_iter().map(Value::from).collect();
    Some(match name {
        "removeprefix" => text.strip_prefix(arg).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(arg).unwrap_or(text).into(),
        "partition" => match text.split_once(arg) {
            Some((a, c)) => three(a, arg, c),
            None => three(text, "", ""),
        },
        "rpartition" => match text.rsplit_once(arg) {
            Some((a, c)) => three(a, arg, c),
            None => three("", "", text),
        },
        _ => return None,
    })
}
