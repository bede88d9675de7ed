"""The rows of the Responses API."""

from __future__ import annotations

from gateway.http.route import Parameter, Route

from .body import ResponsesRequest
from .endpoints import delete_response, get_input_items, get_response, post_cancel, post_response
from .shapes import InputItems, Response, ResponseDeleted, ResponseEvent

ROUTES = (
    Route(
        method="POST",
        path="/v1/responses",
        call=post_response,
        scope="control",
        summary="Answers a conversation of items.",
        body=ResponsesRequest,
        answers={200: Response},
        events=(ResponseEvent,),
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        call=get_response,
        scope="read",
        summary="A response as stored, or as far as it has come; or its events again.",
        answers={200: Response},
        events=(ResponseEvent,),
        parameters=(
            Parameter("stream", "true: the events instead of the whole."),
            Parameter("starting_after", "The sequence number of the last event that was seen.", type=int),
        ),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{id}",
        call=delete_response,
        scope="control",
        verb="delete_response",
        summary="Forgets a stored response; a running one ends.",
        answers={200: ResponseDeleted},
    ),
    Route(
        method="POST",
        path="/v1/responses/{id}/cancel",
        call=post_cancel,
        scope="control",
        verb="cancel_response",
        summary="Ends a running response.",
        answers={200: Response},
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}/input_items",
        call=get_input_items,
        scope="read",
        summary="What a stored response was asked.",
        answers={200: InputItems},
        parameters=(
            Parameter("limit", "Items of a page, 1 to 100.", type=int),
            Parameter("order", "asc or desc (as usual)."),
            Parameter("after", "The id of the last item of the page before."),
        ),
    ),
)
