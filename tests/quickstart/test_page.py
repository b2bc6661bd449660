from megatron_dmtd.quickstart.page import Code, Heading, Paragraph, Picture, SideBySide, Table, to_html, to_markdown


def test_a_page_is_the_same_in_both_forms(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    blocks = [
        Heading("Title", level=1),
        Paragraph("**Bold**, `a < b` and [a link](https://example.org)."),
        Table(("name", "value"), [("`x`", "1 & 2")]),
        Picture(tmp_path / "a.png", "curves"),
        Code("python a.py --x '<y>'"),
        SideBySide(("one", "`two`"), ("a\n\n<b>\n", "`c`")),
    ]
    assert to_markdown(blocks).split("\n\n") == [
        "# Title",
        "**Bold**, `a < b` and [a link](https://example.org).",
        "| name | value |\n| --- | --- |\n| `x` | 1 & 2 |",
        "![curves](a.png)",
        "```bash\npython a.py --x '<y>'\n```",
        '<table>\n<tr><th width="50%">one</th><th width="50%"><code>two</code></th></tr>\n'
        "<tr><td>a<br><br>&lt;b&gt;</td><td>`c`</td></tr>\n</table>\n",
    ]
    page = to_html(blocks, title="A & B")
    for part in (
        "<title>A &amp; B</title>",
        "<h1>Title</h1>",
        '<p><b>Bold</b>, <code>a &lt; b</code> and <a href="https://example.org">a link</a>.</p>',
        "<table>\n<tr><th>name</th><th>value</th></tr>\n<tr><td><code>x</code></td><td>1 &amp; 2</td></tr>\n</table>",
        'alt="curves" src="data:image/png;base64,iVBORw=="',
        "<pre>python a.py --x &#x27;&lt;y&gt;&#x27;</pre>",
    ):
        assert part in page
