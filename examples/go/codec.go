package main

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers its own codec first
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/runtime/protoimpl"
)

// codec takes messages of both of Go's protobuf generations. Debian's grpc-go 1.33 brings one for the older alone; from
// grpc-go 1.36 on, delete this file.
type codec struct{}

func init() { encoding.RegisterCodec(codec{}) }

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(protoimpl.X.ProtoMessageV2Of(message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, protoimpl.X.ProtoMessageV2Of(message))
}
